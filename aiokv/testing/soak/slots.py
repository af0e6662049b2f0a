"""A place where one worker after the other lives, always at the same address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from aiokv.testing.soak.judge import Judge, Side
from aiokv.testing.soak.nursery import Nursery
from aiokv.testing.soak.orders import (
    Changed,
    Ended,
    Explain,
    Explained,
    Finish,
    Health,
    Move,
    Opened,
    Order,
    Probe,
    Promised,
    Reopen,
    Start,
    Trip,
    decode_report,
    encode,
)
from aiokv.testing.soak.proxy import Proxy

__all__ = ["Slot"]

#: Within this time an order that is no transfer is answered (s).
_ANSWER_S = 30.0
_TRANSPORTS = ("shm", "cma", "tcp")
_AXES = ("sbthd", "bsthd", "bhtsd", "")


class Slot:
    """An address, its proxies, and the worker that lives there now.

    Args:
        number: Of the slot.
        nursery: Where workers come from.
        judge: Is told what they say.
        chance: Draws what each worker is like.
        steady: Its worker is never killed, and must not grow.

    Attributes:
        health: What workers of this slot said of themselves, with when; of the present one only.
        up: An engine is open here, and its process runs.
    """

    def __init__(
        self, number: int, nursery: Nursery, judge: Judge, chance: random.Random, *, steady: bool
    ) -> None:
        self.number = number
        self.steady = steady
        self.control, self.data = Proxy(), Proxy()
        self.health: list[tuple[float, Health]] = []
        self.finished: Health | None = None
        self.up = False
        self._nursery = nursery
        self._judge = judge
        self._chance = chance
        self._pid = 0
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        #: Sides that its worker was told to begin and has not ended, with their deadlines.
        self._going: dict[tuple[str, str], tuple[Side, float]] = {}
        #: When the oldest unanswered order that is no transfer has to be answered (s); 0: none is.
        self._answer_by = 0.0
        self._stopped_at = 0.0
        #: It is meant to end.
        self._ends = False

    async def __aenter__(self) -> Self:
        await self.control.__aenter__()
        await self.data.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.kill()
        await self.data.__aexit__(None, None, None)
        await self.control.__aexit__(None, None, None)

    @property
    def address(self) -> str:
        """Where others reach whoever lives here."""
        return f"tcp://127.0.0.1:{self.control.port}"

    @property
    def going(self) -> int:
        """Sides of transfers that are not over here."""
        return len(self._going)

    @property
    def stopped(self) -> bool:
        """Its process is stopped."""
        return self._stopped_at > 0

    # -- the worker's life

    async def start(self) -> None:
        """Let a worker live here."""
        first = (self.number + len(self._nursery.pids)) % len(_TRANSPORTS)
        transports = [*_TRANSPORTS[first:], *_TRANSPORTS[:first]]
        start = Start(
            slot=self.number,
            transports=transports,
            axes=self._chance.choice(_AXES),
            control=self.control.port,
            data=self.data.port,
            uvloop=self._chance.random() < 0.5,
            seed=self._chance.getrandbits(32),
        )
        self._pid, sock = self._nursery.start(start)
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.health, self._stopped_at, self._ends = [], 0.0, False
        self._answer_by = time.monotonic() + _ANSWER_S
        self._listening = asyncio.create_task(self._listen(reader))

    async def kill(self) -> None:
        """SIGKILL, whatever it is doing; what it had begun ends with it."""
        self._ends, self.up = True, False
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        await self.gone()

    async def gone(self) -> None:
        """Wait until the worker is gone."""
        if self._listening is not None:
            await self._listening
            self._listening = None

    def stop(self) -> None:
        """SIGSTOP."""
        if self._pid:
            os.kill(self._pid, signal.SIGSTOP)
            self._stopped_at = time.monotonic()
            self.up = False

    def trip(self, after: int) -> None:
        """Let the worker stop itself just before so many more copies; ``tripped`` tells when."""
        self._tell(Trip(after))

    def tripped(self) -> bool:
        """Whether the worker has stopped itself; ``stop`` takes note of it."""
        if not self._pid or self.stopped:
            return False
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def state(self) -> str:
        """How its process is, in words."""
        try:
            letter = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            letter = "gone"
        going = ", ".join(f"{role} of {tid}" for tid, role in self._going)
        return f"worker {self.number}: up {self.up}, stopped {self.stopped}, process {letter}; going: {going}"

    def go_on(self) -> None:
        """SIGCONT. Time in which it was stopped is held against nobody here."""
        if not self._stopped_at:
            return
        os.kill(self._pid, signal.SIGCONT)
        now = time.monotonic()
        for side, _ in self._going.values():
            side.due += now - max(self._stopped_at, side.issued)
        if self._answer_by:
            self._answer_by += now - self._stopped_at
        self._stopped_at, self.up = 0.0, True

    def forgive(self, seconds: float) -> None:
        """So much time passed in which nobody here looked or listened."""
        for side, _ in self._going.values():
            side.due += seconds
        if self._answer_by:
            self._answer_by += seconds

    # -- orders

    def move(self, order: Move) -> None:
        """Begin one side of a transfer."""
        side = self._judge.begin(order, time.monotonic())
        self._going[order.tid, order.role] = (side, order.deadline_s)
        self._tell(order)

    def ask(self, order: Reopen | Probe | Explain | Finish) -> None:
        """Anything else; it is answered by a report."""
        self._answer_by = self._answer_by or time.monotonic() + _ANSWER_S
        if isinstance(order, Reopen):
            self.up = False
        if isinstance(order, Finish):
            self._ends = True
        self._tell(order)

    def _tell(self, order: Order) -> None:
        if self._writer is not None:
            self._writer.write(encode(order))

    def late(self, now: float) -> list[str]:
        """What should be over and isn't, in words."""
        if self.stopped:
            return []
        found = [f"{side.role} of {side.tid} hangs" for side, _ in self._going.values() if now > side.due]
        if self._answer_by and now > self._answer_by:
            found.append("it doesn't answer")
        return [f"worker {self.number}: {text}" for text in found]

    # -- what it says

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(line)
        if not self._ends:
            self._judge.wrong.append(f"worker {self.number}: its process ended by itself")
        self.up, self._pid, self._answer_by, self._stopped_at = False, 0, 0.0, 0.0
        self.control.behind = self.data.behind = 0
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for tid, role in list(self._going):
            self._over(Ended(tid, "producer" if role == "producer" else "consumer", "killed"))

    def _hear(self, line: bytes) -> None:
        match report := decode_report(line):
            case Opened():
                self.control.behind, self.data.behind = report.control, report.data
                self.up, self._answer_by = True, 0.0
            case Promised():
                self._judge.promise(report)
            case Ended():
                self._over(report)
            case Explained():
                self._judge.explained.append(f"worker {self.number}: {report.text}")
            case Changed():
                self._judge.wrong.append(f"worker {self.number}: {report.text}")
            case Health():
                self._answer_by = 0.0
                self.health.append((time.monotonic(), report))
                if report.finished:
                    self.finished = report

    def _over(self, ended: Ended) -> None:
        side = self._going.pop((ended.tid, ended.role), None)
        self._judge.end(ended, side[1] if side else 0.0)
