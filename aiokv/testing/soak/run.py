"""A soak from its start to the verdict."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from aiokv.testing.soak.faults import Faults
from aiokv.testing.soak.judge import Judge
from aiokv.testing.soak.nursery import Nursery
from aiokv.testing.soak.orders import Explain, Finish, Move, Probe
from aiokv.testing.soak.slots import Slot
from aiokv.testing.soak.worker import SETTINGS

__all__ = ["Soak", "run"]

#: Sides that one worker has at a time, at most, and seconds between two transfers, by the worker.
_AT_ONCE, _EVERY_S = 6, 0.08
#: Seconds between two looks at whether something hangs, and at how workers are.
_LOOK_S, _PROBE_S = 0.5, 2.0
#: Within this time who stopped itself is met (s).
_TRIPPED_S = 0.3
#: Until everything that goes on has ended, after the last order (s).
_END_S = 60.0
#: What workers get to say what goes on where something is wrong (s).
_EXPLAIN_S = 10.0
#: What a steady worker may hold more in the last quarter of its life than in the second (bytes).
_GROWTH = 8 << 20
#: Shorter lives say nothing of growth (s).
_GROWS_AFTER_S = 120.0
#: Descriptors of a worker with its engine open, beside those for each other worker.
_DESCRIPTORS, _BY_PEER = 48, 12


class Soak:
    """One run.

    Args:
        nursery: Where the workers come from.
        seed: Draws what happens; when, and in which order, is the machines' business.
        workers: How many. Every other one is steady.
        tell: Takes lines for people.
    """

    def __init__(self, nursery: Nursery, seed: int, workers: int, tell: Callable[[str], None]) -> None:
        chance = random.Random(seed)  # noqa: S311
        self.judge = Judge()
        self.slots = [
            Slot(number, nursery, self.judge, random.Random(chance.random()), steady=number % 2 == 0)  # noqa: S311
            for number in range(workers)
        ]
        self.faults = Faults(self.slots, random.Random(chance.random()))  # noqa: S311
        self._chance = chance
        self._seed = seed
        self._tell = tell
        self._begun = time.monotonic()
        self._number = 0
        #: Since when workers that nobody stopped have been standing still.
        self._patience: dict[Slot, float] = {}

    async def run(self, seconds: float, every_s: float = 60.0) -> list[str]:
        """Play for so long, let everything end, and look what is left; gives what is wrong."""
        async with AsyncExitStack() as stack:
            for slot in self.slots:
                await stack.enter_async_context(slot)
                await slot.start()
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch())
                going = [self.faults.go_on(), self._order(), self._probe(), self._show(every_s)]
                tasks = [watching, *(group.create_task(each) for each in going)]
                await asyncio.wait([watching], timeout=seconds)
                for task in tasks:
                    task.cancel()
            if not self.judge.wrong:
                await self._end()
            if self.judge.wrong:
                await self._explain()
            self._tell(self.summary())
        return self.judge.wrong

    # -- while it goes on

    async def _order(self) -> None:
        """Begin one transfer after the other."""
        while True:
            await asyncio.sleep(self._chance.expovariate(len(self.slots) / _EVERY_S))
            open_ = [slot for slot in self.slots if (slot.up or slot.stopped) and slot.going < _AT_ONCE]
            if len(open_) >= 2:
                self._move(*self._chance.sample(open_, 2))

    def _move(self, producer: Slot, consumer: Slot) -> None:
        chance, push = self._chance, self._chance.random() < 0.4
        self._number += 1
        tid = f"{self._seed}-{self._number}"
        blocks = chance.choice((1, 2, 3, 4, 6, 12))
        deadline = chance.choice((0.1, 0.5, 2.0, 5.0, 5.0, 5.0))
        pause = chance.choice((0.0, 0.0, 0.001, 0.02, 0.2))

        def cancels() -> list[float]:
            if chance.random() > 0.08:
                return []
            first = chance.random() ** 2
            return [first] if chance.random() < 0.7 else [first, first + chance.random() / 10]

        offer = Move(
            tid, "producer", consumer.address if push else "", blocks, deadline, pause, cancels(), False
        )
        fetch = Move(
            tid,
            "consumer",
            "" if push else producer.address,
            blocks,
            deadline,
            0.0,
            cancels(),
            chance.random() < 0.5,
        )
        if chance.random() < 0.5:
            producer.move(offer)
            consumer.move(fetch)
        else:
            consumer.move(fetch)
            producer.move(offer)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_S)
            for slot in self.slots:
                if slot.up:
                    slot.ask(Probe())

    async def _watch(self) -> None:
        """Look whether anything hangs, or is wrong; nothing needs to go on then."""
        before = time.monotonic()
        while not self.judge.wrong:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            late, before = now - before - _LOOK_S, now
            if late > _LOOK_S:
                # The machine stood still, or this process: what workers said meanwhile lies unread.
                for slot in self.slots:
                    slot.forgive(late)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for slot in self.slots:
            self.judge.wrong += slot.late(now)
            if slot.tripped() and now > self._patience.setdefault(slot, now) + _TRIPPED_S:
                slot.stop()  # it stopped itself when nobody looked any more
                slot.go_on()
            elif not slot.tripped():
                self._patience.pop(slot, None)

    async def _show(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._tell(self.summary())

    # -- the end

    async def _end(self) -> None:
        """Let everything end by itself, then close engines, and look what is left."""
        until = time.monotonic() + _END_S
        while any(slot.going or not slot.up for slot in self.slots):
            await asyncio.sleep(_LOOK_S / 5)
            self._look()
            if time.monotonic() > until:
                stuck = [slot.number for slot in self.slots if slot.going or not slot.up]
                self.judge.wrong.append(f"workers {stuck} did not come to rest")
            if self.judge.wrong:
                return
        await asyncio.sleep(2 * SETTINGS.drain_ns / 1e9)  # leases and what is parked run out
        for slot in self.slots:
            slot.ask(Probe())
            slot.ask(Finish())
        for slot in self.slots:
            async with asyncio.timeout(_END_S):
                await slot.gone()
        for slot in self.slots:
            self.judge.wrong += [f"worker {slot.number}: {text}" for text in self._left(slot)]

    async def _explain(self) -> None:
        """Let workers say what goes on, as far as they can."""
        for slot in self.slots:
            self._tell(slot.state())
            slot.ask(Explain())
        await asyncio.sleep(_EXPLAIN_S)
        for text in self.judge.explained:
            self._tell(text)

    def _left(self, slot: Slot) -> list[str]:
        """What a worker still held, at rest and in the end."""
        if slot.finished is None or len(slot.health) < 2:
            return ["it ended without a word"]
        rest, last, wrong = slot.health[-2][1], slot.finished, []
        # Requests wait for their other half until their deadlines are over.
        held = {name: count for name, count in rest.holds.items() if count and name != "parked"}
        if held:
            wrong.append(f"at rest it held {held}")
        if rest.descriptors > _DESCRIPTORS + _BY_PEER * len(self.slots):
            wrong.append(f"at rest it had {rest.descriptors} descriptors")
        if rest.sessions > 2 * len(self.slots):
            wrong.append(f"at rest it had {rest.sessions} sessions")
        if last.descriptors > 0 or last.mappings > 0 or last.tasks > 0:
            wrong.append(
                f"in the end {last.descriptors} descriptors, {last.mappings} mappings and {last.tasks} tasks"
            )
        if slot.steady:
            wrong += _grown(slot)
        return wrong

    # -- for people

    def summary(self) -> str:
        """What happened so far, in some lines."""
        judge, minutes = self.judge, (time.monotonic() - self._begun) / 60
        ways = ", ".join(f"{count} by {name}" for name, count in sorted(judge.by_transport.items()))
        lines = [
            f"{minutes:.1f} min: {judge.begun} transfers, {judge.verified} landed and compared "
            f"({judge.verified_bytes / 2**30:.2f} GiB; {ways}), {judge.unverified} landed of producers that "
            f"were killed before they said what it was; {len(judge.wrong)} wrong",
            "  ends: " + ", ".join(f"{count} {what}" for what, count in sorted(judge.outcomes.items())),
            "  done to workers: "
            + ", ".join(f"{count} {what}" for what, count in self.faults.counts.items()),
            "  workers: " + "; ".join(_how(slot) for slot in self.slots if slot.health),
        ]
        return "\n".join(lines)


def _how(slot: Slot) -> str:
    health = slot.health[-1][1]
    return f"{slot.number}: {health.resident >> 20} MiB, {health.descriptors} fds, {health.sessions} sessions"


def _grown(slot: Slot) -> list[str]:
    """Whether a worker that lived long grew, in words; its quarters differ by chance."""
    first, last = slot.health[0][0], slot.health[-1][0]
    if last - first < _GROWS_AFTER_S:
        return []
    quarter = (last - first) / 4
    early = _typical(slot, first + quarter, first + 2 * quarter)
    late = _typical(slot, first + 3 * quarter, last)
    if late - early <= _GROWTH:
        return []
    return [f"it grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB"]


def _typical(slot: Slot, begin: float, end: float) -> float:
    found: Sequence[int] = [health.resident for when, health in slot.health if begin <= when <= end]
    return statistics.median(found) if found else 0.0


def run(seconds: float, seed: int, workers: int, tell: Callable[[str], None]) -> list[str]:
    """Run a soak in this process, and its workers in theirs.

    Args:
        seconds: For how long faults are made.
        seed: Draws what happens.
        workers: How many, at least two.
        tell: Takes lines for people.

    Returns:
        What is wrong, in words; empty where all is well.
    """
    with Nursery() as nursery:
        wrong = asyncio.run(Soak(nursery, seed, workers, tell).run(seconds))
    if left := nursery.alive():
        wrong.append(f"the processes {left} were left behind")
    return wrong
