"""Nonsense for everything that makes values of a peer's bytes, without a loop.

A case is a frame: noise, or a genuine one that was spoiled, changed, put together of two, or made very large.
It is decoded as an engine decodes it, with all that follows from its messages alone: block lists are
unpacked, layouts compared, placements checked and copies planned. Only the documented errors may come of it,
what is planned must lie within the buffers, and no case may take much more memory than it has bytes.
"""

from __future__ import annotations

import random
import resource
import sys
import tracemalloc
from collections import Counter

import msgspec
import numpy as np

from aiokv.control.base import MAX_FRAME
from aiokv.errors import InvalidBlocks, LayoutMismatch, RemoteProtocolError
from aiokv.proto.messages import (
    Accept,
    Frame,
    Grant,
    Hello,
    Message,
    decode_frame,
    decode_messages,
    unpack_blocks,
)
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy
from aiokv.testing.fuzz.mutation import Mutator
from aiokv.testing.fuzz.recording import LAYOUTS, genuine_frames

__all__ = ["fuzz"]

#: One case in so many is looked at for the memory that it takes, which is slow.
_WEIGHED = 16
#: What a case may take beside a multiple of its bytes: errors, caches of the interpreter, small plans.
_ALLOWANCE, _MULTIPLE = 256 << 10, 200
#: What all cases together may add to the process, beyond what the largest frames need.
_GROWTH = 256 << 20
#: One case in so many is as large as frames may be, or larger.
_LARGE = 2000


def fuzz(cases: int, seed: int) -> Counter[str]:
    """Decode so many frames that are not as they should be.

    Args:
        cases: How many.
        seed: Draws them; a case depends on its number and this alone.

    Returns:
        How many were refused where, and how many could be read.

    Raises:
        AssertionError: Something else than the documented errors came of one; the message names it.
    """
    kit = _Kit(genuine_frames(), seed)
    counts: Counter[str] = Counter()
    before = _resident()
    for number in range(cases):
        try:
            counts[kit.play(number)] += 1
        except Exception as error:
            text = f"case {number} of seed {seed}: {error!r} from {kit.data[:200].hex()}"
            raise AssertionError(text) from error
    grown = _resident() - before
    if grown > _GROWTH:
        raise AssertionError(f"seed {seed}: the process grew by {grown} bytes in {cases} cases")
    return counts


def _resident() -> int:
    """The most memory that this process ever had (bytes)."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Kit:
    """What cases are made from, and the one that is played.

    Args:
        frames: Genuine ones.
        seed: Draws the cases.
    """

    def __init__(self, frames: list[bytes], seed: int) -> None:
        self._frames: dict[type[Message], list[bytes]] = {}
        for data in frames:
            kind = type(decode_messages(decode_frame(data))[0])
            self._frames.setdefault(kind, []).append(data)
        self._seed = seed
        #: The case that is played.
        self.data = b""
        #: Our own sides: what a peer says meets each layout that it can be about.
        self._ours = [(layout, Placement.dense(layout)) for layout in LAYOUTS]
        self._hellos = [
            message
            for data in frames
            for message in decode_messages(decode_frame(data))
            if isinstance(message, Hello)
        ]

    def play(self, number: int) -> str:
        """Make a case and decode it; gives what became of it."""
        chance = random.Random(self._seed * 1_000_003 + number)  # noqa: S311
        self.data = self._make(chance, number)
        if number % _WEIGHED:
            return self._take(chance)
        tracemalloc.start()
        try:
            found = self._take(chance)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if most > _ALLOWANCE + _MULTIPLE * len(self.data):
            raise AssertionError(f"{len(self.data)} bytes took {most} bytes of memory")
        return found

    # -- making

    def _make(self, chance: random.Random, number: int) -> bytes:
        mutator, data = Mutator(chance), self._genuine(chance)
        if number % _LARGE == _LARGE - 1:
            return self._large(chance, data)
        pick = chance.random()
        if pick < 0.08:
            return mutator.noise()
        if pick < 0.33:
            return mutator.spoil(data, self._genuine(chance))
        if pick < 0.43:
            return mutator.change(data)
        # The header stays mostly good, so that what is inside of it is looked at.
        data = mutator.change_body(data)
        return mutator.spoil(data) if pick > 0.97 else data

    def _genuine(self, chance: random.Random) -> bytes:
        """A frame as it should be; each kind of message as likely as any other, but those of many fields."""
        kind = chance.choice((Hello, Hello, Accept, Grant, *self._frames))
        return chance.choice(self._frames[kind])

    def _large(self, chance: random.Random, data: bytes) -> bytes:
        size = chance.choice((MAX_FRAME, MAX_FRAME // 2, 2 * MAX_FRAME))
        frame = msgspec.msgpack.decode(data)
        ids = np.full(size // 4, chance.choice((0, 3, 2**32 - 1)), "<u4").tobytes()
        frame[7] = chance.choice(
            (
                [[2]] * 65_536,
                [[2]] * 65_537,
                [[12, "t", 0, 2**40, [[0, ids]], b"", 0]],
                [[12, "t", 0, 1, [[0, b""]] * 100_000, b"", 0]],
                [[12, "t", 0, 1, [], b"\xff" * size, 0]],
                [[4, "x" * size]],
                [msgspec.Raw(b"\x91" * size)],
            )
        )
        return msgspec.msgpack.encode(frame)

    # -- taking

    def _take(self, chance: random.Random) -> str:
        """As an engine does it, up to where the rest depends on what it knows."""
        try:
            frame = decode_frame(self.data)
        except RemoteProtocolError:
            return "no frames"
        try:
            messages = decode_messages(frame)
        except RemoteProtocolError:
            return "frames with malformed messages"
        kinds = {self._follow(frame, message, chance) for message in messages}
        return next((kind for kind in _ORDER if kind in kinds), "well-formed")

    def _follow(self, frame: Frame, message: Message, chance: random.Random) -> str:
        match message:
            case Hello():
                try:
                    message.placement.check(message.layout)
                except ValueError:
                    return "placements refused"
                return self._plan(message, None, chance)
            case Accept(blocks=blocks):
                return self._lists(blocks, message, chance)
            case Grant(blocks=blocks):
                return self._lists(blocks, message, chance)
            case _:
                return "well-formed"

    def _lists(self, blocks: tuple[tuple[int, bytes], ...], message: Message, chance: random.Random) -> str:
        hello = chance.choice(self._hellos)
        try:
            lists = unpack_blocks(blocks, hello.layout)
        except RemoteProtocolError:
            return "block lists refused"
        return self._plan(hello, lists, chance)

    def _plan(self, hello: Hello, lists: tuple[GroupBlocks, ...] | None, chance: random.Random) -> str:
        """Plan a copy from the peer's cache, or to it, as an engine does."""
        fits = [(layout, place) for layout, place in self._ours if not list(layout.differences(hello.layout))]
        if not fits:
            return "layouts refused"
        layout, place = chance.choice(fits)
        if lists is None:
            lists = tuple(_some(group.blocks, chance) for group in hello.layout.groups)
        own = tuple(_some(group.blocks, chance) for group in layout.groups)
        mine, theirs = Side(layout, place, own), Side(hello.layout, hello.placement, lists)
        sides = (mine, theirs) if chance.random() < 0.5 else (theirs, mine)
        heads = [chance.choice((group.heads, (0, 1), (0, 0))) for group in layout.groups]
        first, tokens = chance.choice((0, 0, 3, 8)), chance.choice((1, 5, 8, 16))
        try:
            plan = plan_copy(*sides, first_token=first, tokens=tokens, heads=heads)
        except (InvalidBlocks, LayoutMismatch, ValueError):
            return "plans refused"
        _check_within(plan, *sides)
        return "plans made"


#: What counts of a frame whose messages met different ends.
_ORDER = ("plans made", "plans refused", "layouts refused", "block lists refused", "placements refused")


def _some(blocks: int, chance: random.Random) -> GroupBlocks:
    """Block ids of a cache, as an engine's own caller lists them."""
    ids = [chance.randrange(min(blocks, 2**31)) for _ in range(chance.choice((2, 4)))]
    return GroupBlocks(0, np.array(ids, dtype=np.int64))


def _check_within(plan: CopyPlan, src: Side, dst: Side) -> None:
    """Every byte of a plan lies within the buffers of both sides."""
    for layer in plan.layers:
        for copy in plan.copies(layer):
            pieces = len(copy.section.src)
            for source, froms, target, tos, lengths in copy.extents(0, pieces):
                for offsets, side, buffer in ((froms, src, source), (tos, dst, target)):
                    low, high = int(offsets.min()), int((offsets + lengths).max())
                    if not 0 <= low <= high <= side.placement.buffers[buffer]:
                        raise AssertionError(f"layer {layer}: bytes {low}..{high} of buffer {buffer}")
