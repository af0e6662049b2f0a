"""One simulated world: processes, the network between them, what happened, and what is wrong."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiokv.device.hazards import Hazard
from aiokv.engine.transfer import Fetch, Offer
from aiokv.testing.simulation.network import SimulatedNetwork
from aiokv.testing.simulation.process import Process
from aiokv.testing.simulation.records import Record
from aiokv.testing.simulation.scenario import FetchPlan, OfferPlan, Request, Scenario
from aiokv.testing.simulation.sending import SendingTransport
from aiokv.testing.virtual import START_NS, VirtualLoop, VirtualTime
from aiokv.transports.memory import MemoryHub

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["World"]

#: Nanoseconds that a turn of a loop takes.
TURN_NS = 20_000

#: Turns of a world, far more than one needs.
MOST_TURNS = 300_000


class World:
    """Everything that one seed brings about.

    Args:
        scenario: What shall happen.
        verbose: Put control messages into the trace, too.

    Attributes:
        processes: For each rank the process that runs it now, or did last.
        past: All processes that there were.
        users: Tasks of users that are going on in processes that live.
        failures: What is wrong; the first one stops the world.
        trace: What happened: time (ns), who, what.
    """

    def __init__(self, scenario: Scenario, *, verbose: bool = False) -> None:
        self.scenario = scenario
        self.verbose = verbose
        self.rng = random.Random(f"world {scenario.seed}")  # noqa: S311
        self.time = VirtualTime(order=self.rng, turn_ns=TURN_NS, most_turns=MOST_TURNS)
        self.loop = VirtualLoop(self.time, "world")
        self.loop.set_exception_handler(
            lambda _, context: self.fail(f"world: {context['message']}: {context.get('exception')!r}")
        )
        self.network = SimulatedNetwork(self, scenario.channel)
        for rank in scenario.ranks:
            self.network.alias(rank.alias, rank.address)
        self.hub = MemoryHub(name=b"seededly")
        self._issued = 0
        self.senders: dict[bytes, SendingTransport] = {}
        self.users: set[asyncio.Task[None]] = set()
        self.records: list[Record] = []
        self.failures: list[str] = []
        self.error: BaseException | None = None
        self.trace: deque[tuple[int, str, str]] = deque(maxlen=20_000)
        self.excused: set[str] = set()
        self.hazards_excused = 0
        self.ending = False
        self.asked = 0
        self.attempts: set[tuple[str, int]] = set()
        self.left_out: set[str] = set()
        self.excuse_frees = False
        self._timers: list[asyncio.TimerHandle] = []
        self._pokes: list[asyncio.Future[None]] = []
        #: Times in which nobody could run, and for each process those in which it could not (ns).
        self._jumps: list[tuple[int, int]] = []
        self._frozen: dict[Process, list[list[int]]] = {}
        self.processes = [Process(self, rank, 0) for rank in scenario.ranks]
        self.past = list(self.processes)

    # -- what happens

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self.time.now, who, what))

    def issue(self) -> bytes:
        """A name for something that is sent by; counted, since chance is drawn by it."""
        self._issued += 1
        return self._issued.to_bytes(16, "big")

    def leave_out(self, process: Process, request: Request, why: str) -> None:
        """A process can't take part in a request, so that may not end well."""
        self.note(process.name, f"takes no part in {request.tid}: {why}")
        self.left_out.add(request.tid)

    def fail(self, why: str, error: BaseException | None = None) -> None:
        """Something is wrong. The world stops before its next turn."""
        self.note("FAILED", why)
        self.failures.append(why)
        self.error = self.error or error
        self.poke()

    def story(self) -> list[str]:
        """The trace as text."""
        return [f"{(when - START_NS) / 1e9:10.6f} {who:>12}  {what}" for when, who, what in self.trace]

    def content(self, request: Request) -> str:
        """Names what the model computes for a request."""
        return f"{self.scenario.seed}/{request.tid}/{request.attempt}"

    def record(
        self, process: Process, handle: Offer | Fetch, request: Request, plan: OfferPlan | FetchPlan
    ) -> Record:
        """Begin to take down one side of a transfer."""
        record = Record(process, handle, request, plan)
        self.records.append(record)
        return record

    # -- running

    def run(self, work: Awaitable[None]) -> None:
        """Run something on the world's loop, with all processes, until it is over or something fails."""
        task = self.loop.create_task(_awaited(work), name="the world")
        self.time.run(lambda: bool(self.failures) or task.done())
        if task.done() and not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.fail(f"the simulation itself failed: {error!r}", error)

    def settle(self, limit_s: float) -> bool:
        """Run until nothing is scheduled anywhere; False if that is not so within ``limit_s``."""
        return self.time.settle(int(limit_s * 1e9), lambda: bool(self.failures))

    def poke(self) -> None:
        """Something happened that the world may wait for."""
        pokes, self._pokes = self._pokes, []
        for future in pokes:
            if not future.done():
                future.set_result(None)

    async def until(self, reached: Callable[[], bool], limit_s: float) -> bool:
        """Wait on the world's loop; False if it was not reached within ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                while not reached():
                    future = self.loop.create_future()
                    self._pokes.append(future)
                    await future
        except TimeoutError:
            return False
        return True

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        """Call something on the world's loop, unless the scenario is over by then."""
        self._timers.append(self.loop.call_later(delay_s, call, *args))

    def forget_timers(self) -> None:
        """The scenario is over: call nothing that was put off."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # -- lost time

    def jump(self, seconds: float) -> None:
        """Nobody runs for a while, as when the machine is suspended."""
        self.note("world", f"time jumps by {seconds:.3f} s")
        self._jumps.append((self.time.now, self.time.now + int(seconds * 1e9)))
        self.time.advance(int(seconds * 1e9))

    def suspended(self, process: Process, *, begins: bool) -> None:
        """A process can't run from now on, or can again."""
        spans = self._frozen.setdefault(process, [])
        if begins:
            spans.append([self.time.now, 1 << 62])
        else:
            spans[-1][1] = self.time.now

    def time_suspended(self, process: Process, begin: int, end: int) -> int:
        """Nanoseconds between two times in which a process could not run."""
        spans = [*self._jumps, *self._frozen.get(process, ())]
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in spans)

    # -- hazards

    def hazard(self, hazard: Hazard) -> None:
        """The mocked devices found one."""
        if hazard.kind == "write under a reader" and self._excusing:
            self.excused.add(hazard.first)
        if hazard.kind == "use after free" and self.excuse_frees:
            return
        if hazard.first in self.excused:
            self.hazards_excused += 1
            return
        self.fail(f"hazard: {hazard}")

    @contextmanager
    def excusing(self, record: Record) -> Iterator[None]:
        """Blocks are reused whose reader's lease ran out.

        It may still be reading. It must not believe what it reads, which the bytes tell.
        """
        self._excusing = record.lease_ran_out
        record.process.expired |= self._excusing
        try:
            yield
        finally:
            self._excusing = False

    _excusing = False

    def dispose(self) -> None:
        """Give everything up."""
        for record in self.records:
            record.handle._course.observed = True  # nobody is left to observe it
        for process in self.past:
            process.dispose()
        self.loop.close()


async def _awaited(work: Awaitable[None]) -> None:
    await work


class Errors(logging.Handler):
    """What the library logs as an error is a failure."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Fail the world."""
        text = record.getMessage()
        # That blocks went into quarantine is checked where transfers end; here, that it isn't made up.
        if "may still be in flight" in text and any(each.quarantined for each in self._world.records):
            return
        self._world.fail(f"logged: {text}")
