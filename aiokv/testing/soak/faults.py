"""What is done to workers and their connections while they transfer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

from aiokv.testing.soak.orders import Reopen
from aiokv.testing.soak.slots import Slot

__all__ = ["Faults"]

#: Seconds between two faults, on average, for each worker.
_EVERY_S = 2.5
#: How long something is stopped, stalled or away at most (s): longer than silence is forgiven.
_MOST_S = 3.5
#: Between two looks at whether a worker has stopped itself.
_LOOK_S = 0.01


class Faults:
    """Does one thing after the other, to some worker.

    Args:
        slots: All of them; the steady ones are not killed.
        chance: Draws what, to whom and when.

    Attributes:
        counts: What was done.
    """

    def __init__(self, slots: Sequence[Slot], chance: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._slots = slots
        self._chance = chance
        self._kinds: dict[str, tuple[int, Callable[[Slot], Coroutine[None, None, None]]]] = {
            "killed": (3, self._kill),
            "stopped": (3, self._stop),
            "stopped in a copy": (5, self._trip),
            "control cut": (2, self._cut_control),
            "data cut": (3, self._cut_data),
            "control stalled": (1, self._stall_control),
            "data stalled": (2, self._stall_data),
            "reopened": (1, self._reopen),
        }

    async def go_on(self) -> None:
        """For ever; what was begun is undone also when this is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._chance.expovariate(len(self._slots) / _EVERY_S))
                slot = self._chance.choice(self._slots)
                weights = [weight for weight, _ in self._kinds.values()]
                kind = self._chance.choices(list(self._kinds), weights)[0]
                dies = kind == "killed" and not slot.steady
                if (slot.up and kind != "killed") or (dies and (slot.up or slot.stopped)):
                    self.counts[kind] += 1
                    group.create_task(self._kinds[kind][1](slot))

    def _while(self) -> float:
        """How long something lasts: mostly short."""
        return float(_MOST_S * self._chance.random() ** 3)

    async def _kill(self, slot: Slot) -> None:
        await slot.kill()
        try:
            await asyncio.sleep(self._while() / 2)
        finally:
            await slot.start()

    async def _stop(self, slot: Slot) -> None:
        slot.stop()
        try:
            await asyncio.sleep(self._while())
        finally:
            slot.go_on()

    async def _trip(self, slot: Slot) -> None:
        """In the middle of a transfer, and often for longer than anybody waits for it."""
        slot.trip(self._chance.randrange(1, 12))
        until = time.monotonic() + _MOST_S
        while not slot.tripped() and time.monotonic() < until:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(_LOOK_S)
        slot.trip(0)
        if slot.tripped():
            slot.stop()
            try:
                await asyncio.sleep(_MOST_S * self._chance.random())
            finally:
                slot.go_on()

    async def _cut_control(self, slot: Slot) -> None:
        slot.control.cut(self._chance)

    async def _cut_data(self, slot: Slot) -> None:
        slot.data.cut(self._chance)

    async def _stall_control(self, slot: Slot) -> None:
        slot.control.stall()
        try:
            await asyncio.sleep(self._while())
        finally:
            slot.control.go_on()

    async def _stall_data(self, slot: Slot) -> None:
        slot.data.stall()
        try:
            await asyncio.sleep(self._while())
        finally:
            slot.data.go_on()

    async def _reopen(self, slot: Slot) -> None:
        slot.ask(Reopen())
