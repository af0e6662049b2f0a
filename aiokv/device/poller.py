"""The only bridge from a device's events to the event loop.

Nothing tells a loop that a device reached an event, short of a thread or a callback that fights
for the GIL. So events are polled, as seldom as it can be done:

* Events on one stream complete in order, so only the oldest pending one of each stream is
  queried. The cost grows with streams, not with what is in flight on them.
* While the expected completion is far, the poller sleeps on a timer of microseconds. Around it,
  it looks once a turn of the loop; when that lasts, at intervals that grow.
* When the loop itself is late, looking at each turn would take the more from those who hold it
  up: then the intervals grow too.
* With nothing pending nothing is scheduled and no timer is armed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from aiokv.device.base import Event
from aiokv.device.expectation import SHORTEST_INTERVAL_NS, Expectations
from aiokv.device.lane import Callback, Lane, Watch
from aiokv.device.timer import MicroTimer, Timer
from aiokv.errors import ClosedError, DeviceError

__all__ = ["Callback", "CompletionPoller", "PollerStatistics"]

#: A wake-up or turn that comes this late means that the loop has other things to do.
LOOP_LATE_NS = 250_000
#: The longest that a late loop puts a look off.
LONGEST_PATIENCE_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class PollerStatistics:
    """What a poller did since it was made; times in nanoseconds."""

    #: Watches whose callback is still to come.
    pending: int
    #: Watches that were called back, and how many of those with an error.
    delivered: int
    failed: int
    #: Times the timer woke the loop, and by how much later than asked, in sum and at worst.
    wakeups: int
    wakeup_lag_ns: int
    wakeup_lag_max_ns: int
    #: Turns of the loop in which it looked, and events queried in them.
    turns: int
    queries: int
    #: Completions that came between two looks: so many, and the time between those two, in sum and at worst.
    polled: int
    lag_ns: int
    lag_max_ns: int


class CompletionPoller:
    """Calls back on the loop when device events are done.

    One belongs to one engine and device, and to the thread of its loop: no method may be called
    from another. It never blocks and makes no task.

    Args:
        loop: The loop to call back on.
        clock: Nanoseconds of a clock that never goes back.
        timer: Makes the timer from a loop and a callback; ``MicroTimer`` by default. A
            simulation passes ``partial(MicroTimer, precise=False)``.
        spin_ns: How long one event may be looked at in each turn of the loop, before the looks
            come at intervals.
        guard: Is entered while events are looked at and delivered, and may be entered again; a GPU's
            (``CudaDevice.quiet``) saves each query from doing so.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        timer: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Timer] | None = None,
        spin_ns: int = 100_000,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._timer = (timer or MicroTimer)(loop, self._on_timer)
        self._spin_ns = spin_ns
        self._guard = guard or nullcontext()
        self._expectations = Expectations()
        self._lanes: dict[object, Lane] = {}
        #: Futures of ``wait`` that are not yet resolved.
        self._futures: set[asyncio.Future[None]] = set()
        self._closed = False
        self._sweeping = False
        #: The call of the next turn; None when none is due.
        self._turn: asyncio.Handle | None = None
        #: When that was asked for.
        self._turn_asked = 0
        #: When the timer fires; None when it is not armed.
        self._armed_at: int | None = None
        #: How long looks are put off since the loop is late.
        self._patience_ns = 0
        self._pending = self._delivered = self._failed = 0
        self._wakeups = self._wakeup_lag_ns = self._wakeup_lag_max_ns = 0
        self._turns = self._queries = 0
        self._polled = self._lag_ns = self._lag_max_ns = 0

    @property
    def pending(self) -> int:
        """Watches whose callback is still to come."""
        return self._pending

    @property
    def statistics(self) -> PollerStatistics:
        """What it did so far."""
        return PollerStatistics(
            pending=self._pending,
            delivered=self._delivered,
            failed=self._failed,
            wakeups=self._wakeups,
            wakeup_lag_ns=self._wakeup_lag_ns,
            wakeup_lag_max_ns=self._wakeup_lag_max_ns,
            turns=self._turns,
            queries=self._queries,
            polled=self._polled,
            lag_ns=self._lag_ns,
            lag_max_ns=self._lag_max_ns,
        )

    def watch(self, event: Event, stream: object, callback: Callback, *, expected_ns: int = 0) -> None:
        """Call ``callback`` once, in a later turn of the loop, when ``event`` is done or failed.

        Never calls back from within. An event that is done already is delivered in the next turn.

        Args:
            event: What to wait for.
            stream: The stream it was recorded on, or what stands for it: anything hashable.
                Events of one stream are watched in the order in which they were recorded; one
                that is watched late is seen no sooner than those watched before it.
            callback: Gets None, or why the event will never be done. What it raises goes to the
                loop's exception handler and stops nothing.
            expected_ns: How many nanoseconds it should take from when the stream comes to it, by the
                caller's best knowledge (bytes over a rate); 0 when nothing is known. What was watched
                before it on the stream is accounted for here. It need not be exact, for the poller
                corrects it by what it sees, but it must not be taken from when callbacks came: that
                includes what the poller overslept.

        Raises:
            ClosedError: The poller was closed.
        """
        if self._closed:
            raise ClosedError("the completion poller was closed")
        now = self._clock()
        lane = self._lanes.get(stream)
        if lane is None:
            lane = self._lanes[stream] = Lane(stream)
        watch = Watch(event, callback, expected_ns, now)
        self._pending += 1
        if not lane.add(watch):
            return
        lane.begin(now, self._expectations.outlook(stream, expected_ns))
        # The loop is awake anyway, so this look costs no wake-up.
        if _over(event):
            # Whoever watches after the fact teaches nothing about durations.
            watch.expected_ns = 0
            lane.look_at = now
        if not self._sweeping:
            self._schedule(now)

    def wait(self, event: Event, stream: object, *, expected_ns: int = 0) -> asyncio.Future[None]:
        """A future that is resolved when ``event`` is done; arguments as for ``watch``.

        The future is only a bell: cancelling it withdraws nothing from the device and changes
        nothing for others who wait for the same event. It raises DeviceError when the event
        fails, and ClosedError when the poller is closed first.
        """
        future: asyncio.Future[None] = self._loop.create_future()

        def ring(error: DeviceError | None) -> None:
            self._futures.discard(future)
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.watch(event, stream, ring, expected_ns=expected_ns)
        self._futures.add(future)
        return future

    def close(self) -> None:
        """Stop looking. No callback is called any more, and who awaits ``wait`` gets ClosedError.

        What is in flight on the device is not touched. May be called twice, and by a callback.
        """
        self._closed = True
        self._lanes.clear()
        self._pending = 0
        self._armed_at = None
        self._timer.close()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for future in self._futures:
            if not future.done():
                future.set_exception(ClosedError("the completion poller was closed"))
                # Marks it as seen: a future that nobody awaits is not an error to log.
                future.exception()
        self._futures.clear()

    def _on_timer(self) -> None:
        armed_at, self._armed_at = self._armed_at, None
        if armed_at is None:
            return
        now = self._clock()
        late = max(now - armed_at, 0)
        self._wakeups += 1
        self._wakeup_lag_ns += late
        self._wakeup_lag_max_ns = max(self._wakeup_lag_max_ns, late)
        self._sweep(now, late)

    def _on_turn(self) -> None:
        self._turn = None
        now = self._clock()
        self._sweep(now, now - self._turn_asked)

    def _sweep(self, now: int, late: int) -> None:
        """Look at every stream that is due; ``late`` is how long the loop took to come here."""
        if late > LOOP_LATE_NS:
            self._patience_ns = min(max(late, 2 * self._patience_ns), LONGEST_PATIENCE_NS)
        else:
            self._patience_ns = self._patience_ns // 2 if self._patience_ns > SHORTEST_INTERVAL_NS else 0
        self._turns += 1
        self._sweeping = True
        try:
            with self._guard:
                for lane in tuple(self._lanes.values()):
                    # A callback may have closed the poller.
                    if lane.look_at <= now and not self._closed:
                        self._look(lane, now)
        finally:
            self._sweeping = False
            self._schedule(now)

    def _look(self, lane: Lane, now: int) -> None:
        """Deliver what is done on one stream, oldest first, and say when to look at it again."""
        # What callbacks add is looked at in the next turn, or one that always adds an event that
        # is done already would hold the loop for ever.
        for _ in range(len(lane.watches)):
            error = None
            self._queries += 1
            try:
                if not lane.watches[0].event.done():
                    lane.pending(now, spin_ns=self._spin_ns, patience_ns=self._patience_ns)
                    return
            except DeviceError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
                error = DeviceError(f"an event could not be queried: {failure!r}")
                error.__cause__ = failure
            self._finish(lane, now, error)
            if self._closed:
                return
        if not lane.watches:
            del self._lanes[lane.stream]

    def _finish(self, lane: Lane, now: int, error: DeviceError | None) -> None:
        """Learn from the completion, or failure, of a stream's oldest event, and deliver it."""
        watch, finding = lane.over(now)
        if error is not None:
            self._failed += 1
        elif finding.polled_ns is not None:
            self._expectations.polled(lane.stream, watch.expected_ns, finding.polled_ns)
            self._polled += 1
            self._lag_ns += finding.gap_ns
            self._lag_max_ns = max(self._lag_max_ns, finding.gap_ns)
        elif finding.overslept:
            self._expectations.overslept(lane.stream, watch.expected_ns)
        if lane.watches:
            lane.begin(now, self._expectations.outlook(lane.stream, lane.watches[0].expected_ns))
            lane.look_at = now  # the loop is awake anyway
        self._pending -= 1
        self._delivered += 1
        try:
            watch.callback(error)
        except Exception as failure:  # noqa: BLE001 - a caller's mistake stops nobody else's events
            self._loop.call_exception_handler(
                {"message": f"callback of a device event failed: {watch.callback!r}", "exception": failure}
            )

    def _schedule(self, now: int) -> None:
        """Have the loop come back when the next look is due, and not before."""
        if self._closed or self._turn is not None:
            return
        if not self._lanes:
            self._patience_ns = 0
            if self._armed_at is not None:
                self._armed_at = None
                self._timer.disarm()
            return
        look_at = min([lane.look_at for lane in self._lanes.values()])
        if look_at <= now:
            self._turn_asked = now
            self._turn = self._loop.call_soon(self._on_turn)
        elif self._armed_at != look_at:
            self._armed_at = look_at
            # Callbacks may have taken their time since ``now``.
            self._timer.arm(max(look_at - self._clock(), 0))


def _over(event: Event) -> bool:
    """Whether there is something to deliver; what went wrong is found again when it is."""
    try:
        return event.done()
    except Exception:  # noqa: BLE001 - the look that delivers it tells
        return True
