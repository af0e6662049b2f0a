"""One of the two processes between which KV in GPU memory moves: a cache, engines, and bare ways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiokv
from aiokv.bench.child import Line
from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.cuda.llama import Llama, token_bytes
from aiokv.bench.cuda.rawnccl import RawPair, new_id
from aiokv.bench.partner import Partner
from aiokv.bench.raw import RawReader, RawSender
from aiokv.device.host import HostBuffer
from aiokv.errors import AiokvError

__all__ = ["FUNCTION", "End", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.cuda.end:serve"

#: Bytes of host memory that bare sockets fill, and that bare DMA goes to.
HOST_BYTES = 256 << 20
#: Messages of bare NCCL, as the layers of a cache.
_MESSAGES = 32


async def serve(line: Line, *, rank: int, gpus: int, blocks: int, tokens: int, transports: list[str]) -> None:
    """Answer each command with what it gives; see the methods of ``End``."""
    gpu = Gpu(rank % gpus)
    llama = Llama(gpu, blocks)
    async with AsyncExitStack() as stack:
        engines, faults = await _engines(stack, llama, transports)
        end = End(gpu, llama, engines, rank, tokens, sender=0)
        line.say(
            addresses={name: engine.address for name, engine in engines.items()},
            faults=faults,
            id=new_id(gpu) if rank == 0 else "",
        )
        async for told in line:
            do = told.pop("do")
            try:
                line.say(**(await getattr(end, do)(**told)))
            except AiokvError as error:  # one transport that fails is not all of them
                line.say(error=f"{do}: {error}")


async def _engines(
    stack: AsyncExitStack, llama: Llama, transports: Sequence[str]
) -> tuple[dict[str, aiokv.TransferEngine], dict[str, str]]:
    """One for each transport that can serve the cache, and why the others can't."""
    engines, faults = {}, {}
    for name in transports:
        try:
            engine = aiokv.TransferEngine(llama.cache, transports=[name])
            engines[name] = await stack.enter_async_context(engine)
        except (AiokvError, ValueError, OSError) as error:
            faults[name] = str(error)
    return engines, faults


class End:
    """What a process can be told to do.

    Args:
        gpu: The GPU.
        llama: The cache.
        engines: By transport.
        rank: 0: it offers and sends; 1: it fetches and receives.
        tokens: The most that bare ways move at a time.
        sender: The GPU of rank 0.
    """

    def __init__(
        self,
        gpu: Gpu,
        llama: Llama,
        engines: Mapping[str, aiokv.TransferEngine],
        rank: int,
        tokens: int,
        *,
        sender: int,
    ) -> None:
        self._gpu, self._llama, self._engines, self._rank = gpu, llama, engines, rank
        self._partners = {name: Partner(engine) for name, engine in engines.items()}
        torch = gpu.torch
        nbytes = tokens * token_bytes()
        #: Memory that lies together: one piece at the sender, two where copies are made.
        self._pieces = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(1 + rank)]
        #: What is copied from, on the GPU where the KV comes from.
        self._source = self._pieces[0]
        if rank and sender != gpu.device.ordinal:
            self._source = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{sender}")
            self._pieces[1].copy_(self._source)  # torch lets the GPUs reach each other, if they can
        self._raw: RawPair | None = None
        self._host = HostBuffer.allocate(HOST_BYTES)
        self._pinned = [gpu.host_memory(HOST_BYTES) for _ in range(2 * rank)]
        self._streams = [gpu.stream() for _ in range(2)]
        self._sender: RawSender | None = None
        self._reader: RawReader | None = None

    # -- aiokv

    async def fill(self, seed: int) -> dict[str, Any]:
        """Write random numbers to the whole cache."""
        self._llama.fill(seed)
        return {}

    async def same(self, seed: int, there: list[int], here: list[int]) -> dict[str, Any]:
        """Whether blocks have what they should."""
        return {"same": self._llama.same(seed, there, here)}

    async def offer(self, engine: str, tids: list[str], blocks: list[int]) -> dict[str, Any]:
        """Offer the same blocks under each id, all written."""
        return await self._partners[engine].offer(tids, [blocks] * len(tids))

    async def finish(self, engine: str) -> dict[str, Any]:
        """Wait until all was fetched."""
        return await self._partners[engine].finish()

    async def fetch(self, engine: str, tids: list[str], blocks: list[int], source: str) -> dict[str, Any]:
        """Fetch one after another; how long each took."""
        found = []
        for tid in tids:
            began = time.monotonic_ns()
            async with self._engines[engine].fetch(tid, blocks, sources=[source], deadline=20) as fetch:
                await fetch.wait()
            found.append(time.monotonic_ns() - began)
        return {"ns": found}

    async def profile(self, engine: str, file: str = "") -> dict[str, Any]:
        """Begin to profile; with a file, end and write there."""
        return await self._partners[engine].profile(file)

    # -- bare ways

    async def join(self, id: str) -> dict[str, Any]:  # noqa: A002 - as it is called on the line
        """Make the pair of ranks."""
        self._raw = await asyncio.to_thread(RawPair, self._gpu, id, self._rank)
        return {}

    async def nccl(self, tokens: int, grouped: bool) -> dict[str, Any]:
        """Send, or receive and say how long it took, as many bytes as these tokens have."""
        raw = self._raw
        if raw is None:
            raise RuntimeError("there is no pair yet")
        nbytes = tokens * token_bytes() // _MESSAGES
        address = self._pieces[0].data_ptr()
        post = raw.recv if self._rank else raw.send
        began = time.monotonic_ns()
        if grouped:
            with raw.group():
                for number in range(_MESSAGES):
                    post(address + number * nbytes, nbytes)
        else:
            for number in range(_MESSAGES):
                post(address + number * nbytes, nbytes)
        if self._rank:
            raw.synchronize()
        return {"ns": [time.monotonic_ns() - began]}

    async def d2d(self, tokens: int, times: int) -> dict[str, Any]:
        """Copy within the GPU, or from the sender's; how long each took."""
        runtime, stream = self._gpu.runtime, self._streams[0].ptr
        src, dst = self._source.data_ptr(), self._pieces[1].data_ptr()
        found = []
        for _ in range(times):
            began = time.monotonic_ns()
            runtime.memcpyAsync(dst, src, tokens * token_bytes(), 4, stream)  # which kind, addresses tell
            runtime.streamSynchronize(stream)
            found.append(time.monotonic_ns() - began)
        return {"ns": found}

    async def pcie(self) -> dict[str, Any]:
        """DMA in both directions at once, chunk by chunk; how long so many bytes each way took."""
        runtime, chunk = self._gpu.runtime, 8 << 20
        out, back = self._pieces[0].data_ptr(), self._pieces[1].data_ptr()
        began = time.monotonic_ns()
        for at in range(0, HOST_BYTES, chunk):
            runtime.memcpyAsync(self._pinned[0] + at, out + at, chunk, 2, self._streams[0].ptr)
            runtime.memcpyAsync(back + at, self._pinned[1] + at, chunk, 1, self._streams[1].ptr)
        self._gpu.synchronize()
        return {"ns": [time.monotonic_ns() - began], "nbytes": HOST_BYTES}

    async def listen(self, streams: int) -> dict[str, Any]:
        """Serve host memory over bare sockets."""
        self._sender = RawSender(self._host.view, streams)
        return {"port": self._sender.port}

    async def dial(self, port: int, streams: int) -> dict[str, Any]:
        """Connect to such a sender."""
        self._reader = RawReader(port, streams)
        return {}

    async def sockets(self) -> dict[str, Any]:
        """Fill host memory over bare sockets; how long it took."""
        if self._reader is None:
            raise RuntimeError("there is no connection yet")
        began = time.monotonic_ns()
        self._reader.read(self._host.view)
        return {"ns": [time.monotonic_ns() - began], "nbytes": HOST_BYTES}
