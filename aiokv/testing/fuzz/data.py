"""Nonsense for the data ports: the handshakes of ``tcp`` and ``shm``, and what goes over a ``tcp`` link.

Two engines' data planes move parts to each other all the while. Strangers dial the producer's ports, some
of them knowing its token; producers that are not what they seem answer the consumer; and one that knows
its part, but not its manners, sends frames to it. After each case the consumer's memory is as it was but
where a part was expected, nothing went to the loop's exception handler, and in the end the good peer's
parts still move.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import Part, Path, TransportKit, bytes_of
from aiokv.testing.fuzz import frames, handshakes
from aiokv.testing.fuzz.mutation import Mutator
from aiokv.transports.base import Transport
from aiokv.transports.shm import ShmTransport
from aiokv.transports.tcp import TcpTransport

__all__ = ["attack", "fuzz"]

_LAYOUT = CacheLayout.attention(layers=2, blocks=16, block_size=4, heads=2, head_size=16, dtype="float16")
#: Cases between two transfers of the good peer.
_BATCH = 25
#: Tokens of a part, and bytes of a chunk, so that a part has some of them.
_TOKENS, _CHUNK = 14, 600
#: After this time somebody hangs (s).
_PATIENCE_S = 30.0


def fuzz(cases: int, seed: int) -> Counter[str]:
    """Play so many cases, on a loop of its own.

    Args:
        cases: How many.
        seed: Draws them; a case depends on its number and this alone.

    Returns:
        What came of how many.

    Raises:
        AssertionError: Something else than the documented errors came of one; the message names it.
    """
    return asyncio.run(attack(cases, seed))


async def attack(cases: int, seed: int) -> Counter[str]:
    """As ``fuzz``, on the running loop."""
    counts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler() if hasattr(loop, "get_exception_handler") else None
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    try:
        async with _Tcp(seed) as tcp, _Shm(seed) as shm:
            scenes = [await _Scene.open(tcp), await _Scene.open(shm)]
            for number in range(cases):
                chance = random.Random(f"{seed}:{number}")  # noqa: S311 - a seed that a failure prints
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        counts[await _play(chance, scenes)] += 1
                        if number % _BATCH == _BATCH - 1 or number == cases - 1:
                            for scene in scenes:
                                await scene.move()
                    if wrong:
                        raise AssertionError(f"the loop was told of {wrong}")
                except Exception as error:
                    raise AssertionError(f"case {number} of seed {seed}: {error!r}") from error
    finally:
        loop.set_exception_handler(before)
    return counts


async def _play(chance: random.Random, scenes: list[_Scene]) -> str:
    scene = scenes[0] if chance.random() < 0.8 else scenes[1]
    mutator = Mutator(chance)
    engine = scene.path.consumer
    if scene.kit is scenes[0].kit and chance.random() < 0.6:
        before = engine.copy_of_memory()
        part = scene.part()
        outcome = await frames.send_nonsense(mutator, engine, part)
        _check(engine.copy_of_memory(), before, part)
        return f"frames: {outcome}"
    before = engine.copy_of_memory()
    outcome = await handshakes.meet(mutator, scene.path.producer, engine)
    _check(engine.copy_of_memory(), before, None)
    return f"{engine.transport.name} handshake: {outcome}"


def _check(after: list[NDArray[np.uint8]], before: list[NDArray[np.uint8]], part: Part | None) -> None:
    """Nothing was written but where the part goes."""
    for number, (now, then) in enumerate(zip(after, before, strict=True)):
        changed = now != then
        if part is not None:
            for layer in part.plan.layers:
                for copy in part.plan.copies(layer):
                    for _, _, buffer, starts, lengths in copy.extents(0, len(copy.section.src)):
                        if buffer == number:
                            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                                changed[start : start + length] = False
        if changed.any():
            raise AssertionError(f"{int(changed.sum())} bytes changed that are no part's, in buffer {number}")


class _Tcp(TransportKit):
    def make_transport(self) -> Transport:
        return TcpTransport(streams=3)


class _Shm(TransportKit):
    def make_transport(self) -> Transport:
        return ShmTransport()


class _Scene:
    """Two engines, a link between them that is nobody's business, and what moves over it."""

    def __init__(self, kit: TransportKit, path: Path) -> None:
        self.kit = kit
        self.path = path
        self._good = path.part(kit, 1, tokens=_TOKENS)
        self._parts = 1

    @classmethod
    async def open(cls, kit: TransportKit) -> _Scene:
        producer = await kit.engine(_LAYOUT)
        consumer = await kit.engine(_LAYOUT)
        return cls(kit, await consumer.read_from(producer))

    def part(self) -> Part:
        """The same blocks once more, as a part of its own."""
        self._parts += 1
        return replace(self._good, id=(f"part-{self._parts}", 1), landed={}, bell=asyncio.Event())

    async def move(self) -> None:
        """Move a part over the good link, and compare all of the consumer's memory."""
        part = self.part()
        for buffer in self.path.consumer.cache.buffers:
            bytes_of(buffer)[:] = self.kit.random.randrange(256)
        expected = self.path.consumer.copy_of_memory()
        part.apply(self.path.producer.copy_of_memory(), expected)
        part.expect()
        for chunk in part.chunks(_CHUNK):
            await part.move(self.kit, chunk)
        await part.until(part.plan.total)
        for found, wanted in zip(self.path.consumer.copy_of_memory(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        if not part.one_sided:
            self.path.end.forget(part.id)
