"""The batches that a rank entered, reduced one after another, round by round; nobody has to wait for that."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from aiokv.device.base import Event
from aiokv.device.poller import CompletionPoller
from aiokv.errors import (
    AiokvError,
    BusyError,
    ClosedError,
    DeadlineExceeded,
    DeviceError,
    LocalProtocolError,
    PeerLostError,
)
from aiokv.ranks.agreement import Agreement
from aiokv.ranks.base import Collective
from aiokv.ranks.outcomes import Outcome
from aiokv.ranks.units import MOST

__all__ = ["Place", "Rounds"]

_log = logging.getLogger("aiokv")

#: After a rank's deadline the backend may go on for so long (s) before it gives up by itself: whoever waits
#: is told by aiokv first, and no thread of the backend's is left waiting for good.
_DRAIN_S = 2.0
#: What a reduction is expected to take at first; the poller learns what it does.
_EXPECTED_NS = 150_000


class Place:
    """One batch in the order of this rank's: first come, first reduced, once it is entered."""

    __slots__ = ("agreement", "deadline_s", "future", "number", "timer")

    def __init__(self, number: int, future: asyncio.Future[list[Outcome]]) -> None:
        #: Of the batch, as this rank counts.
        self.number = number
        #: None until it is entered; those behind it wait for that.
        self.agreement: Agreement | None = None
        self.deadline_s = 0.0
        #: Only a bell. Cancelled once nobody waits; the reduction goes on, since others take part in it.
        self.future = future
        #: None for a batch of which nothing is sent.
        self.timer: asyncio.TimerHandle | None = None

    def settle(self, error: Exception) -> None:
        """Tell who waits, if anybody does."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_exception(error)


class Rounds:
    """Makes no task: what was entered is reduced by callbacks, whatever becomes of who entered it.

    Args:
        collective: Reduces; closed in the end.
        poller: Makes what waits for reductions, from the loop.

    Attributes:
        poller: What waits for reductions; None before the first batch.
        holder: Who alone may enter a batch now; None where anybody may.
        lost: Why the group was given up; None while it wasn't.
        closed: By its own user.
        agreed: Batches that were agreed on, the empty ones included.
        differed: Batches that could not be agreed on.
        given_up: Batches that ended with the group.
        rounds: Reductions that were begun.
    """

    def __init__(
        self, collective: Collective, poller: Callable[[asyncio.AbstractEventLoop], CompletionPoller]
    ) -> None:
        self._collective = collective
        self._make_poller = poller
        #: The loop that this belongs to; None before the first batch.
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Batches that are not over. The first is being reduced, if it was entered.
        self._places: deque[Place] = deque()
        #: Of the reduction that is on its way; None between two.
        self._event: Event | None = None
        #: Number of the batch that was entered last.
        self._number = 0
        self.poller: CompletionPoller | None = None
        self.holder: object | None = None
        self.lost: AiokvError | None = None
        self.closed = False
        self.agreed = self.differed = self.given_up = self.rounds = 0

    def hold(self, holder: object) -> None:
        """Let nobody else enter a batch until this one did, or ``holder`` is None again.

        Raises:
            AiokvError: As for ``enter``.
        """
        self._check(None)
        self._expect_nobody()
        self.holder = holder

    def enter(
        self,
        outcomes: Sequence[Outcome],
        keys: Iterable[bytes] | None,
        deadline_s: float,
        *,
        holder: object | None = None,
    ) -> asyncio.Future[list[Outcome]]:
        """Enter a batch. Never blocks.

        Args:
            outcomes: What this rank found.
            keys: What the requests are; None where the caller doesn't say.
            deadline_s: For all of its rounds, from now on.
            holder: Who enters it, if somebody holds this.

        Returns:
            What all ranks come to. May be cancelled by whoever doesn't want it any more.

        Raises:
            BusyError: Somebody waits for another batch, or holds this; nothing was entered.
            ClosedError: It was closed.
            PeerLostError: The group was given up.
            LocalProtocolError: It belongs to another loop.
        """
        self._check(holder)
        self._expect_nobody()
        self.holder = None
        place = self.take()
        self.fill(place, outcomes, keys, deadline_s)
        return place.future

    def take(self) -> Place:
        """Take the next place, behind all that are waited for; it has to be filled, whatever happens.

        Raises:
            AiokvError: As for ``enter``, but that others may wait.
        """
        loop = self._check(None)
        self._number += 1
        place = Place(self._number, loop.create_future())
        self._places.append(place)
        return place

    def fill(
        self, place: Place, outcomes: Sequence[Outcome], keys: Iterable[bytes] | None, deadline_s: float
    ) -> None:
        """Enter the batch of a place, once; arguments as for ``enter``. Never blocks or raises."""
        if place.agreement is not None or place not in self._places:
            return  # the group was given up meanwhile
        collective = self._collective
        place.agreement = Agreement(
            outcomes, keys, batch=place.number & MOST, rank=collective.rank, world=collective.size
        )
        place.deadline_s = deadline_s
        if not place.agreement.empty:
            place.timer = place.future.get_loop().call_later(deadline_s, self._on_deadline, place)
        if place is self._places[0]:
            self._begin()

    def close(self) -> None:
        """Give the group up; who waits gets ClosedError. May be called twice."""
        if not self.closed:
            self.closed = True
            self._end(ClosedError("the group of ranks was closed"))

    def _check(self, holder: object | None) -> asyncio.AbstractEventLoop:
        """Whether this rank may enter a batch; gives the loop."""
        if self.closed:
            raise ClosedError("the group of ranks was closed")
        if self.lost is not None:
            raise PeerLostError(f"this group of ranks was given up: {self.lost}") from self.lost
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self.poller = loop, self._make_poller(loop)
        elif loop is not self._loop:
            raise LocalProtocolError("a group of ranks belongs to the loop that used it first")
        if self.holder is not holder:
            raise _busy()
        return loop

    def _expect_nobody(self) -> None:
        if self._places and not self._places[-1].future.done():
            raise _busy()

    def _begin(self) -> None:
        """Begin the next round of the first batch, if it was entered."""
        while self._places and (agreement := self._places[0].agreement) is not None and agreement.empty:
            self._finish(self._places.popleft(), agreement)
        collective, poller = self._collective, self.poller
        if not self._places or poller is None:
            return
        place = self._places[0]
        if place.agreement is None:
            return
        place.agreement.write(collective.vector)
        try:
            event = collective.reduce(place.deadline_s + _DRAIN_S)
        except AiokvError as error:
            self._fail(error)
            return
        self._event = event
        self.rounds += 1
        poller.watch(event, self, partial(self._on_reduced, event), expected_ns=_EXPECTED_NS)

    def _on_reduced(self, event: Event, error: DeviceError | None) -> None:
        if event is not self._event:
            return  # the look at the deadline came first
        self._event = None
        try:
            if error is not None:
                raise error
            agreement = self._places[0].agreement
            more = agreement is not None and agreement.read(self._collective.vector)
        except DeviceError as failure:
            self._fail(failure)
            return
        if agreement is not None and not more:
            self._finish(self._places.popleft(), agreement)
        self._begin()

    def _finish(self, place: Place, agreement: Agreement) -> None:
        """A batch is over: tell who waits."""
        # Where the ranks had counted differently, they go on from the highest.
        self._number += agreement.ahead
        for later in self._places:
            later.number += agreement.ahead
            if later.agreement is not None:
                later.agreement.batch = later.number & MOST
        try:
            agreed = agreement.agreed()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            self.differed += 1
            place.settle(error)
            return
        self.agreed += 1
        if place.timer is not None:
            place.timer.cancel()
        if not place.future.done():
            place.future.set_result(agreed)

    def _on_deadline(self, place: Place) -> None:
        # The verdict comes after one more look: the loop itself may have been late.
        while (event := self._event) is not None:
            error = None
            try:
                if not event.done():
                    break
            except DeviceError as failure:
                error = failure
            self._on_reduced(event, error)
        collective, agreement = self._collective, place.agreement
        if place not in self._places or agreement is None:
            return
        self._end(
            DeadlineExceeded(
                f"rank {collective.rank} of {collective.size}: not all ranks came to a batch of "
                f"{agreement.size} requests within {place.deadline_s:g} s; rounds over: {agreement.rounds}"
            )
        )

    def _fail(self, error: AiokvError) -> None:
        """The reduction failed, or could not be begun."""
        if isinstance(error, ClosedError):
            self._end(error)
            return
        collective = self._collective
        lost = PeerLostError(
            f"rank {collective.rank} of {collective.size}: a rank was lost, or the way to it: {error}"
        )
        lost.__cause__ = error
        self._end(lost)

    def _end(self, error: AiokvError) -> None:
        """Give the group up. What is in flight is the backend's, with the buffers that it writes to."""
        self._event = None
        if self.lost is None:
            self.lost = error
            if not self.closed:
                _log.warning("%s", error)
        if self.poller is not None:
            self.poller.close()
        while self._places:
            place = self._places.popleft()
            self.given_up += 1
            # A batch that couldn't be agreed on anyway says that, which is what can be mended.
            place.settle(place.agreement.fault if place.agreement and place.agreement.fault else error)
        self._collective.close()


def _busy() -> BusyError:
    return BusyError("another task is at it: one batch at a time, in the same order on every rank")
