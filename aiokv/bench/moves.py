"""Ways to move bytes from a source to here, each as a function of the work that is to be timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

import aiokv
from aiokv.bench.child import Child
from aiokv.bench.raw import PlainCopy, ProcessReads, RawReader
from aiokv.bench.source import BLOCK, LAYERS

__all__ = ["Fetches", "Offers", "RemoteOffers", "Work", "copies", "raw_reads", "raw_sockets"]

#: Bytes of a fragment.
_FRAGMENT = BLOCK // 2

_SEED = 11


class Work(NamedTuple):
    """What is moved, and how often."""

    nbytes: int
    #: In fragments of 32 KiB, in random order on both sides; else in as few ranges as the layout has.
    paged: bool
    #: Transfers of so many bytes each at the same time.
    at_once: int
    #: So often, one after another.
    times: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.nbytes * self.at_once * self.times

    @property
    def layers(self) -> int:
        """Layers of the cache that it is done on: a few blocks can't be spread over many."""
        return LAYERS[-1] if self.nbytes >= 16 * LAYERS[-1] * BLOCK else LAYERS[0]

    def blocks(self, seed: int) -> list[list[int]]:
        """Block ids of each of the transfers at once."""
        each = self.nbytes // (BLOCK * self.layers)
        ids = np.arange(each * self.at_once)
        if self.paged:
            np.random.default_rng(seed).shuffle(ids)
        return [ids[first : first + each].tolist() for first in range(0, len(ids), each)]


class Offers(Protocol):
    """The producing side of a pair of engines."""

    async def offer(self, tids: list[str], blocks: list[list[int]]) -> object:
        """Offer blocks under each id, all written."""

    async def finish(self) -> object:
        """Wait until all of them were fetched."""


class RemoteOffers:
    """Those of an engine of the other process."""

    def __init__(self, peer: Child, engine: str) -> None:
        self._peer, self._engine = peer, engine

    async def offer(self, tids: list[str], blocks: list[list[int]]) -> object:
        """Offer blocks under each id, all written."""
        return await self._peer.ask("offer", engine=self._engine, tids=tids, blocks=blocks)

    async def finish(self) -> object:
        """Wait until all of them were fetched."""
        return await self._peer.ask("finish", engine=self._engine)


class Fetches:
    """Transfers by one transport: an engine here and one at the source, for each number of layers."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[aiokv.TransferEngine, Offers, str]] = {}
        self._round = 0

    def add(self, layers: int, engine: aiokv.TransferEngine, offers: Offers, address: str) -> None:
        """A pair of engines, with the address of the one at the source."""
        self._pairs[layers] = engine, offers, address

    async def move(self, work: Work) -> float:
        """Do it, and give the rate in bytes a second."""
        engine, offers, address = self._pairs[work.layers]
        self._round += 1
        name = f"{self._round}"
        there, here = work.blocks(_SEED), work.blocks(_SEED + 1)
        tids = [[f"{name}.{time}.{number}" for number in range(work.at_once)] for time in range(work.times)]
        await offers.offer([tid for row in tids for tid in row], there * work.times)

        async def fetched(tid: str, blocks: list[int]) -> None:
            async with engine.fetch(tid, blocks, sources=[address], deadline=600) as fetch:
                await fetch.wait()

        began = time.monotonic_ns()
        for row in tids:
            if len(row) == 1:
                await fetched(row[0], here[0])
            else:
                await asyncio.gather(*map(fetched, row, here))
        took = time.monotonic_ns() - began
        await offers.finish()
        return work.total / took * 1e9


async def raw_sockets(reader: RawReader, view: memoryview, work: Work) -> float:
    """Fill the start of ``view`` over bare sockets; the rate in bytes a second."""
    return _timed(work, lambda: reader.read(view[: work.nbytes]))


async def raw_reads(reads: ProcessReads, work: Work) -> float:
    """Read by bare system calls, contiguous or in fragments; the rate in bytes a second."""
    if not work.paged:
        return _timed(work, lambda: reads.read(work.nbytes))
    random = np.random.default_rng(_SEED)
    offsets = np.arange(0, work.nbytes, _FRAGMENT)
    vectors = reads.vectors(random.permutation(offsets), random.permutation(offsets), _FRAGMENT)
    return _timed(work, lambda: reads.read_vectors(vectors))


async def copies(copy: PlainCopy, work: Work) -> float:
    """Copy within this process; the rate in bytes a second."""
    return _timed(work, lambda: copy.copy(work.nbytes))


def _timed(work: Work, once: Callable[[], None]) -> float:
    began = time.monotonic_ns()
    for _ in range(work.times):
        once()
    return work.nbytes * work.times / (time.monotonic_ns() - began) * 1e9
