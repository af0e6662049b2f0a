"""One of two processes between which layers go over NCCL: by aiokv, by two other designs, and by NCCL alone.

Rank 0 sends. Times are of the clock that all processes of a host share.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import aiokv
from aiokv.bench.child import Line
from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.cuda.llama import Llama
from aiokv.bench.cuda.pipes import OneTensorPipe, PickledPipe, Pipe, Stages
from aiokv.bench.cuda.rawnccl import RawPair, new_id

__all__ = ["FUNCTION", "LAYER_BYTES", "PipeEnd", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.cuda.pipeend:serve"

#: A layer: 2,000 tokens of 4 KV heads of 128 in bfloat16, K and V.
_BLOCKS, _HEADS = 125, 4
LAYER_BYTES = _BLOCKS * 16 * _HEADS * 128 * 2 * 2
#: Seconds between two looks at whether a transfer was granted, which nobody measures.
_LOOK_S = 0.5e-3


async def serve(line: Line, *, rank: int, ordinal: int, layers: list[int]) -> None:
    """Answer each command with what it gives; see the methods of ``PipeEnd``."""
    gpu = Gpu(ordinal)
    async with AsyncExitStack() as stack:
        caches = {count: Llama(gpu, _BLOCKS, layers=count, heads=_HEADS) for count in layers}
        engines = {
            count: await stack.enter_async_context(aiokv.TransferEngine(kept.cache, transports=["nccl"]))
            for count, kept in caches.items()
        }
        end = PipeEnd(gpu, caches, engines, rank)
        addresses = {count: engine.address for count, engine in engines.items()}
        line.say(addresses=addresses, id=new_id(gpu) if rank == 0 else "")
        async for told in line:
            do = told.pop("do")
            line.say(**(await getattr(end, do)(**told)))


class PipeEnd:
    """What a process can be told to do; ``layers`` says with which of its caches.

    Args:
        gpu: The GPU.
        caches: By their number of layers.
        engines: Of those caches.
        rank: 0 sends, 1 receives.
    """

    def __init__(
        self, gpu: Gpu, caches: dict[int, Llama], engines: dict[int, aiokv.TransferEngine], rank: int
    ) -> None:
        self._gpu, self._caches, self._engines, self._rank = gpu, caches, engines, rank
        self._ids = list(range(_BLOCKS))
        self._offers: dict[str, aiokv.Offer] = {}
        self._pipes: dict[str, Pipe] = {}
        self._raw: RawPair | None = None
        #: What a pipe received last.
        self._received: list[Any] = []

    async def join(self, id: str) -> dict[str, Any]:  # noqa: A002 - as it is called on the line
        """Make the pair of ranks, and the two pipes on it."""
        raw = self._raw = await asyncio.to_thread(RawPair, self._gpu, id, self._rank)
        self._pipes = {"pickled": PickledPipe(self._gpu, raw), "one tensor": OneTensorPipe(self._gpu, raw)}
        return {}

    async def fill(self, layers: int, seed: int) -> dict[str, Any]:
        """Write random numbers to a cache, and forget what came."""
        self._caches[layers].fill(seed)
        self._received = []
        return {}

    async def same(self, layers: int, seed: int) -> dict[str, Any]:
        """Whether what came, to the cache or by a pipe, is what ``fill`` wrote there."""
        cache = self._caches[layers]
        for tensor, came in zip(cache.tensors, self._received, strict=False):
            tensor.copy_(came)
        return {"same": cache.same(seed, self._ids, self._ids)}

    # -- aiokv

    async def arm(self, layers: int, tid: str) -> dict[str, Any]:
        """Offer, with no layer written yet."""
        offer = self._offers[tid] = self._engines[layers].offer(tid, self._ids)
        offer.start()
        return {}

    async def go(self, layers: int, tid: str) -> dict[str, Any]:
        """Once it is granted: all layers are written. When that was."""
        offer = self._offers.pop(tid)
        while "granted" not in offer.progress.parts:
            if offer.done():
                await offer.wait()
            await asyncio.sleep(_LOOK_S)
        began = time.monotonic_ns()
        for layer in range(layers):
            offer.layer_ready(layer)
        said = time.monotonic_ns()
        await offer.wait()
        return {"at": began, "announced": said - began}

    async def fetch(self, layers: int, tid: str, source: str) -> dict[str, Any]:
        """Fetch; when all had landed."""
        async with self._engines[layers].fetch(tid, self._ids, sources=[source]) as fetch:
            await fetch.wait()
            return {"at": time.monotonic_ns()}

    # -- NCCL alone

    def _post(self, layers: int, *, grouped: bool) -> None:
        raw = self._pair()
        post = raw.recv if self._rank else raw.send
        tensors = self._caches[layers].tensors
        if not grouped:
            for tensor in tensors:
                post(tensor.data_ptr(), tensor.nbytes)
            return
        with raw.group():
            for tensor in tensors:
                post(tensor.data_ptr(), tensor.nbytes)

    async def raw_post(self, layers: int, grouped: bool) -> dict[str, Any]:
        """Enqueue what receives."""
        self._post(layers, grouped=grouped)
        return {}

    async def raw_send(self, layers: int, grouped: bool) -> dict[str, Any]:
        """Send; when that began."""
        began = time.monotonic_ns()
        self._post(layers, grouped=grouped)
        self._pair().synchronize()
        return {"at": began}

    async def raw_wait(self) -> dict[str, Any]:
        """When what was enqueued was over."""
        self._pair().synchronize()
        return {"at": time.monotonic_ns()}

    # -- the other designs

    async def pipe_send(self, layers: int, pipe: str) -> dict[str, Any]:
        """Send by a pipe; when that began, and where the time went."""
        chosen = self._pipes[pipe]
        chosen.stages = Stages()
        began = time.monotonic_ns()
        futures = [chosen.send(tensor) for tensor in self._caches[layers].tensors]
        for future in futures:
            future.result()
        return {"at": began, "stages": chosen.stages.spent}

    async def pipe_recv(self, layers: int, pipe: str) -> dict[str, Any]:
        """Receive by a pipe; when all had come, and where the time went."""
        chosen = self._pipes[pipe]
        chosen.stages = Stages()
        self._received = [chosen.recv() for _ in range(layers)]
        return {"at": time.monotonic_ns(), "stages": chosen.stages.spent}

    def _pair(self) -> RawPair:
        if self._raw is None:
            raise RuntimeError("there is no pair yet")
        return self._raw
