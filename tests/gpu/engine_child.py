"""An engine with a cache on the GPU in a process of its own, told what to do by lines of JSON.

Each order has a number, which its answer has, too; orders that take long are answered when they are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import contents, fill
from aiokv.testing.pairs import kv_of

#: Blocks of 32 KiB a layer, 512 MiB in all.
LAYOUT = CacheLayout.attention(layers=8, blocks=1024, block_size=16, heads=8, head_size=128, dtype="bfloat16")


class Child:
    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.handles: dict[str, Any] = {}

    async def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for buffer in self.cache.buffers:
            fill(buffer, random.integers(0, 256, buffer.nbytes, dtype=np.uint8))

    async def digest(self, blocks: list[int]) -> str:
        views = [SimpleNamespace(view=memoryview(contents(buffer))) for buffer in self.cache.buffers]
        there = SimpleNamespace(layout=self.cache.layout, placement=self.cache.placement, buffers=views)
        return hashlib.sha256(kv_of(there, blocks).tobytes()).hexdigest()

    async def offer(self, tid: str, blocks: list[int], deadline: float) -> None:
        async with self.engine.offer(tid, blocks, deadline=deadline) as handle:
            self.handles[tid] = handle

    async def fetch(self, tid: str, blocks: list[int], source: str, deadline: float) -> None:
        async with self.engine.fetch(tid, blocks, sources=[source], deadline=deadline) as handle:
            self.handles[tid] = handle

    async def moving(self, tid: str) -> float:
        """Wait until some of a transfer has moved; tells how much of it."""
        while tid not in self.handles or not self.handles[tid].progress.bytes_moved:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        progress = self.handles[tid].progress
        return progress.bytes_moved / progress.bytes_total

    async def cancel(self, number: int) -> None:
        self.tasks[number].cancel()

    async def statistics(self) -> dict[str, Any]:
        found = self.engine.statistics()
        names = ("leases", "quarantined", "in_flight", "parts", "bytes_received", "loop_lag_max")
        return {name: getattr(found, name) for name in names}

    async def communicators(self) -> int:
        """How many it has."""
        (transport,) = self.engine._transports
        return sum(end._comm is not None for end in transport._home.ends)

    async def memory(self) -> int:
        """Bytes of the GPU that anybody uses."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    async def run(self, number: int, what: str, arguments: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": number}
        try:
            answer["result"] = await getattr(self, what)(**arguments)
        except asyncio.CancelledError:
            answer["error"] = ["CancelledError", ""]
        except Exception as error:  # noqa: BLE001
            answer["error"] = [type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


async def main(transport: str, options: str) -> None:
    from aiokv.device.cuda import CudaDevice

    module, _, name = transport.partition(":")
    made = getattr(importlib.import_module(module), name)(**json.loads(options))
    cache = KVCache.allocate(LAYOUT, device=CudaDevice(0))
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    async with TransferEngine(cache, bind="stream://127.0.0.1:0", transports=[made]) as engine:
        child = Child(engine)
        print(json.dumps({"number": 0, "result": engine.address}), flush=True)
        said = b""

        def readable() -> None:
            nonlocal said
            data = os.read(0, 1 << 16)
            *whole, said = (said + data).split(b"\n")
            for line in whole:
                lines.put_nowait(line)
            if not data:
                lines.put_nowait(b"")
                loop.remove_reader(0)

        loop.add_reader(0, readable)
        while line := await lines.get():
            order = json.loads(line)
            task = loop.create_task(child.run(**order))
            child.tasks[order["number"]] = task
        for task in child.tasks.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
