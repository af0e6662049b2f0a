"""What the conformance suite of transports stands on: two engines' data planes, and parts to move.

The bytes that must have moved are worked out one head at a time, from the layouts alone.
"""

from __future__ import annotations

import abc
import asyncio
import random
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Event, Stream
from aiokv.device.cache import KVCache
from aiokv.device.offloop import off_loop
from aiokv.device.poller import CompletionPoller
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import Chunk, CopyPlan, GroupBlocks, Side, plan_copy
from aiokv.transports.base import Link, PartId, PeerInfo, Transport

__all__ = ["PATIENCE_S", "Engine", "Part", "Path", "TransportKit", "bytes_of", "contents", "done", "fill"]

#: Seconds for what should take milliseconds.
PATIENCE_S = 20.0
_HOST = "127.0.0.1"


class TransportKit(abc.ABC):
    """One kind of transport, and the caches that it works on. An async context manager.

    Args:
        seed: Decides all that the suite draws.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a seed that a failure prints
        self.bytes = np.random.default_rng(seed)
        self._caches: list[KVCache] = []
        self._transports: list[Transport] = []
        self.poller = CompletionPoller(asyncio.get_running_loop())

    @abc.abstractmethod
    def make_transport(self) -> Transport:
        """A new transport of this kind; all of one kit can reach each other."""

    def make_cache(self, layout: CacheLayout) -> KVCache:
        """A new cache that the transport can serve; host memory by default."""
        return KVCache.allocate(layout)

    def forged(self, description: bytes) -> bytes:
        """``description`` with another token than the true one."""
        return bytes([*description[:-1], description[-1] ^ 1])

    async def drive(self) -> None:  # noqa: B027 - most devices work by themselves
        """Let the devices work; called before the suite waits for an event."""

    async def cache(self, layout: CacheLayout) -> KVCache:
        """A cache that the kit closes, made where allocating may take its time."""
        cache = await off_loop(lambda: self.make_cache(layout), "aiokv-cache")
        self._caches.append(cache)
        return cache

    async def engine(self, layout: CacheLayout) -> Engine:
        """One engine's data plane, started: a cache of random bytes and a transport that serves it."""
        cache = await self.cache(layout)
        for buffer in cache.buffers:
            fill(buffer, self.bytes.integers(0, 256, buffer.nbytes, dtype=np.uint8))
        transport = self.make_transport()
        self._transports.append(transport)
        await transport.start(cache, _HOST)
        return Engine(transport, cache)

    async def __aenter__(self) -> TransportKit:
        """Nothing is made before it is needed."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what was made, in an order that was drawn."""
        self.random.shuffle(self._transports)
        for transport in self._transports:
            await transport.aclose()
        self.poller.close()
        for cache in self._caches:
            cache.close()


@dataclass(eq=False)
class Engine:
    """One engine, as far as the suite needs one."""

    transport: Transport
    cache: KVCache
    #: Blocks that a part reads or writes.
    taken: set[int] = field(default_factory=set)

    @property
    def info(self) -> PeerInfo:
        """What a peer knows of it."""
        return PeerInfo("suite", b"i" * 16, self.cache.placement)

    def copy_of_memory(self) -> list[NDArray[np.uint8]]:
        """All that its buffers hold now."""
        return [contents(buffer) for buffer in self.cache.buffers]

    async def read_from(self, producer: Engine) -> Path:
        """A link from ``producer`` to this engine, and the producer's end of it."""
        async with asyncio.timeout(PATIENCE_S):
            link = await self.transport.connect(producer.transport.describe(), producer.info)
        theirs = producer.transport.accepted(link.id)
        assert theirs is not None
        return Path(producer, self, link, theirs)


@dataclass(eq=False)
class Path:
    """A link with both of its ends."""

    producer: Engine
    consumer: Engine
    end: Link
    producer_end: Link

    def part(self, kit: TransportKit, number: int, *, tokens: int = 13, first_token: int = 0) -> Part:
        """A part with drawn blocks at both sides, which no other part has."""
        sides = []
        for engine in (self.producer, self.consumer):
            group = engine.cache.layout.groups[0]
            free = [block for block in range(group.blocks) if block not in engine.taken]
            ids = kit.random.sample(free, -(-tokens // group.block_size))
            engine.taken.update(ids)
            blocks = (GroupBlocks(0, np.array(ids, dtype=np.int64)),)
            sides.append(Side(engine.cache.layout, engine.cache.placement, blocks))
        heads = self.producer.cache.layout.groups[0].heads, self.consumer.cache.layout.groups[0].heads
        common = max(heads[0][0], heads[1][0]), min(heads[0][1], heads[1][1])
        plan = plan_copy(sides[0], sides[1], first_token=first_token, tokens=tokens, heads=common)
        moved = range(first_token, tokens), range(*common)
        return Part((f"part-{number}", 1), self, sides[0], sides[1], plan, *moved)


@dataclass(eq=False)
class Part:
    """One part: what moves, and what has landed of it."""

    id: PartId
    path: Path
    src: Side
    dst: Side
    plan: CopyPlan
    tokens: range
    heads: range
    landed: dict[int, int] = field(default_factory=dict)
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def one_sided(self) -> bool:
        """Whether the consumer reads, or is sent to."""
        return self.path.consumer.transport.one_sided

    @property
    def arrived(self) -> int:
        """Bytes in place, as far as was told."""
        return sum(self.landed.values())

    def chunks(self, limit: int) -> list[Chunk]:
        """All of it, in pieces of at most ``limit`` bytes, layer after layer."""
        return list(self.plan.chunks(self.plan.layers, limit))

    def expect(self) -> None:
        """Two-sided: let it in."""
        if not self.one_sided:
            self.path.end.expect(self.id, self.plan, self.path.consumer.cache.buffers, self._landed)

    def _landed(self, chunk: Chunk) -> None:
        for layer in self.plan.layers_of(chunk):
            self.landed[layer] = self.landed.get(layer, 0) + chunk.nbytes // chunk.layers
        self.bell.set()

    async def move(self, kit: TransportKit, chunk: Chunk) -> None:
        """Move one chunk, and wait until the side that submitted it is done with it."""
        stream: Stream
        if self.one_sided:
            device = self.path.consumer.cache.device
            stream = device.stream()
            event = self.path.end.read(self.plan, chunk, self.path.consumer.cache.buffers, stream=stream)
            await done(kit, event, stream)
            self._landed(chunk)
            return
        end, stream = self.path.producer_end, self.path.producer.cache.device.stream()
        if not end.writable:
            bell = asyncio.Event()
            end.on_writable(bell.set)
            end.on_lost(bell.set)
            while not end.writable and not end.lost:
                bell.clear()
                await bell.wait()
        event = end.send(self.id, self.plan, chunk, self.path.producer.cache.buffers, stream=stream)
        await done(kit, event, stream)

    async def until(self, nbytes: int) -> None:
        """Wait until so many bytes are in place."""
        async with asyncio.timeout(PATIENCE_S):
            while self.arrived < nbytes:
                self.bell.clear()
                await self.bell.wait()

    def apply(self, src: list[NDArray[np.uint8]], dst: list[NDArray[np.uint8]]) -> None:
        """Do to copies of both memories what the part must have done to the real ones."""
        for layer in self.plan.layers:
            for half in range(2):
                for token in self.tokens:
                    for head in self.heads:
                        at, start, size = _place(self.src, layer, half, token, head)
                        to, target, _ = _place(self.dst, layer, half, token, head)
                        dst[to][target : target + size] = src[at][start : start + size]


def _place(side: Side, layer: int, half: int, token: int, head: int) -> tuple[int, int, int]:
    """Buffer, offset and size of one head of one token, K or V."""
    group, place = side.layout.groups[0], side.placement.groups[0]
    block = int(side.blocks[0].ids[token // group.block_size])
    stride_b, stride_s, stride_t, stride_h = place.strides
    buffer, offset = place.layers[layer][half if group.split else 0]
    offset += block * stride_b + token % group.block_size * stride_t + (head - group.heads[0]) * stride_h
    return buffer, offset + (0 if group.split else half * stride_s), group.head_bytes


def contents(buffer: object) -> NDArray[np.uint8]:
    """A copy of what a buffer holds now; of a GPU's memory too, where it may block."""
    if (method := getattr(buffer, "contents", None)) is not None:  # of a kit's own
        return np.array(method())
    if (tensor := getattr(buffer, "tensor", None)) is not None:
        return np.array(tensor().cpu().numpy())
    return bytes_of(buffer).copy()


def fill(buffer: object, data: NDArray[np.uint8]) -> None:
    """Write ``data`` to all of a buffer; it is in place afterwards."""
    if (tensor := getattr(buffer, "tensor", None)) is None:
        bytes_of(buffer)[:] = data
        return
    import torch

    target = tensor()
    target.copy_(torch.from_numpy(data))
    if target.is_cuda:
        torch.cuda.synchronize()


def bytes_of(buffer: object) -> NDArray[np.uint8]:
    """A host or mocked buffer's memory as an array."""
    return np.frombuffer(buffer.view, dtype=np.uint8)  # type: ignore[attr-defined]


async def done(kit: TransportKit, event: Event, stream: object) -> None:
    """Wait until ``event`` is done."""
    await kit.drive()
    async with asyncio.timeout(PATIENCE_S):
        await kit.poller.wait(event, stream)
