"""What every byte of a simulated cache has to be.

A fake inference engine keeps the ledger of its own blocks: which are free, what it wrote where, and what a
transfer may have changed. Blocks are filled with something else the moment a transfer gave them back, so
whoever still reads or writes them is found: by the bytes, or by the mocked device's hazards.

Where a byte is comes from the layout and the placement alone, not from the copy plans that are tested.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.device.cache import KVCache
from aiokv.device.hazards import Access
from aiokv.device.mocked import MockedBuffer, MockedStream
from aiokv.device.mockedstream import MockedEvent, Operation
from aiokv.errors import DeviceError
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.placement import GroupPlacement

__all__ = ["Blocks", "Bytes", "Ledger", "Offsets", "truth"]

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]

#: For each group the ids of blocks.
Blocks = tuple[tuple[int, ...], ...]


def truth(key: str, layout: CacheLayout, layer: int, tokens: int) -> Bytes:
    """What the model computes for a layer: [tokens, halves, the model's heads, bytes of a head]."""
    group = layout.groups[layout.group_of(layer)]
    shape = (tokens, group.halves, group.total_heads, group.head_bytes)
    data = random.Random(f"{key}/{layer}").randbytes(int(np.prod(shape)))  # noqa: S311
    return np.frombuffer(data, np.uint8).reshape(shape)


class Ledger:
    """The bytes of one cache, as they should be.

    Args:
        cache: On mocked memory, all in one buffer.
        rng: Draws blocks and what they are filled with.

    Attributes:
        shadow: The buffer's bytes as they should be, once its streams are through; blocks that a fetch holds
            are as they were before it.
    """

    def __init__(self, cache: KVCache, rng: random.Random) -> None:
        (buffer,) = cache.buffers
        if not isinstance(buffer, MockedBuffer):
            raise TypeError(f"{buffer!r} is not a mocked buffer")
        self.layout = cache.layout
        self.buffer = buffer
        self._rng = rng
        self._cells = [
            cells
            for group, place in zip(cache.layout.groups, cache.placement.groups, strict=True)
            for cells in _cells(group, place)
        ]
        self._free = [list(range(group.blocks)) for group in cache.layout.groups]
        self._busy: list[tuple[Blocks, MockedEvent]] = []
        self.shadow = np.frombuffer(bytearray(rng.randbytes(buffer.nbytes)), np.uint8)
        buffer.bytes[:] = self.shadow

    # -- blocks

    def take(self, tokens: int) -> Blocks | None:
        """Blocks with room for so many tokens, in random places; None if there aren't enough."""
        self.look()
        counts = [max(1, -(-tokens // group.block_size)) for group in self.layout.groups]
        if any(len(free) < count for free, count in zip(self._free, counts, strict=True)):
            return None
        taken = []
        for free, count in zip(self._free, counts, strict=True):
            ids = tuple(self._rng.sample(free, count))
            for each in ids:
                free.remove(each)
            taken.append(ids)
        return tuple(taken)

    def look(self) -> None:
        """See which kernels of its own are through."""
        busy, self._busy = self._busy, []
        for blocks, after in busy:
            self.put_back(blocks, after)

    def put_back(self, blocks: Blocks, after: MockedEvent | None = None) -> None:
        """Blocks that were taken are free again; where there is still a kernel to write them, after that."""
        if after is not None and not _over(after):
            self._busy.append((blocks, after))
            return
        for free, ids in zip(self._free, blocks, strict=True):
            free.extend(ids)

    # -- where bytes are

    def at(self, layer: int, blocks: Blocks, lo: int, hi: int) -> Offsets:
        """Offsets of the bytes of tokens ``lo`` to ``hi``: [tokens, halves, own heads, bytes of a head]."""
        ids = np.array(blocks[self.layout.group_of(layer)], np.int64)
        found = self._cells[layer][ids]
        return found.reshape(-1, *found.shape[2:])[lo:hi]

    def all_of(self, blocks: Blocks) -> Offsets:
        """Offsets of all bytes of blocks, flat."""
        layers = range(self.layout.layers)
        parts = [self._cells[layer][list(blocks[self.layout.group_of(layer)])].ravel() for layer in layers]
        return np.concatenate(parts)

    def heads(self, layer: int) -> slice:
        """Which of the model's heads this cache keeps of a layer."""
        return slice(*self.layout.groups[self.layout.group_of(layer)].heads)

    # -- writing

    def give_up(self, blocks: Blocks, stream: MockedStream | None) -> None:
        """Overwrite blocks, and have them free again."""
        self.overwrite(blocks, stream)
        self.put_back(blocks, stream.record() if stream is not None else None)

    def overwrite(self, blocks: Blocks, stream: MockedStream | None) -> None:
        """Fill blocks with something new: by the host, or by a kernel on a stream."""
        where = self.all_of(blocks)
        self.write(where, np.frombuffer(self._rng.randbytes(where.size), np.uint8), stream)

    def write(self, where: Offsets, data: Bytes, stream: MockedStream | None) -> None:
        """Write bytes, on the host or on a stream, and expect them from now on."""
        flat, values = where.reshape(-1), data.reshape(-1)
        self.shadow[flat] = values
        device = self.buffer.device
        if stream is None:
            device.note(self.buffer.history.add(_access("host write", flat, None)))
            self.buffer.bytes[flat] = values
            return
        half, target = len(flat) // 2, self.buffer.bytes

        def first() -> None:
            target[flat[:half]] = values[:half]

        def second() -> None:
            target[flat[half:]] = values[half:]

        with stream.device.lock:
            access = _access(f"write on {stream.timeline.name}", flat, stream)
            device.note(self.buffer.history.add(access))
            stream.push(Operation(first, second))

    # -- reading

    def read(self, where: Offsets) -> Bytes:
        """Read on the host, at once; a hazard unless the host knows that it is written."""
        self.buffer.device.note(self.buffer.history.add(_access("host read", where.reshape(-1), None, False)))
        return self.buffer.bytes[where]

    def read_later(self, where: Offsets, stream: MockedStream) -> list[Bytes]:
        """Enqueue a kernel that reads; the list has its result once it ran."""
        result: list[Bytes] = []
        with stream.device.lock:
            access = _access(f"read on {stream.timeline.name}", where.reshape(-1), stream, False)
            self.buffer.device.note(self.buffer.history.add(access))
            stream.push(Operation(lambda: result.append(self.buffer.bytes[where])))
        return result

    def expect(self, where: Offsets, data: Bytes) -> None:
        """A transfer wrote this."""
        self.shadow[where] = data

    def wrong(self, spared: Sequence[Blocks] = ()) -> str:
        """What differs from what it should be, but for blocks that are spared; empty if nothing does."""
        differs = self.buffer.bytes != self.shadow
        for blocks in spared:
            differs[self.all_of(blocks)] = False
        places = np.flatnonzero(differs)
        return (
            f"{len(places)} bytes from {places[0]} on are not what was written there" if len(places) else ""
        )


def _cells(group: GroupLayout, place: GroupPlacement) -> list[Offsets]:
    """For each layer the offset of every byte: [blocks, block size, halves, heads, bytes of a head]."""
    b, s, t, h = place.strides
    planes = group.halves // group.planes
    one = (
        np.arange(group.blocks)[:, None, None, None, None] * b
        + np.arange(group.block_size)[:, None, None, None] * t
        + np.arange(planes)[:, None, None] * s
        + np.arange(group.head_count)[:, None] * h
        + np.arange(group.head_bytes)
    )
    return [np.concatenate([one + offset for _, offset in layer], axis=2) for layer in place.layers]


def _over(event: MockedEvent) -> bool:
    try:
        return event.done()
    except DeviceError:
        return True


def _access(what: str, flat: Offsets, stream: MockedStream | None, writes: bool = True) -> Access:
    """Single bytes as the ranges that they make up."""
    ordered = np.sort(flat)
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    starts = ordered[np.concatenate([[0], breaks + 1])]
    ends = ordered[np.concatenate([breaks, [len(ordered) - 1]])] + 1
    point = stream.timeline.advance() if stream is not None else None
    return Access(what, starts, ends - starts, writes=writes, point=point)
