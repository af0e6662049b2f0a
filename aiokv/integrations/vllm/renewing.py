"""What requests in the queue will fetch: the prefill side is told, again and again, to hold it.

A decode side that is busy may give a request its blocks only after minutes, while what nobody wants is to be
held for seconds (vllm#21570). The worker's loop does it, and not vLLM's steps, which may take long.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError, CapacityError
from aiokv.integrations.vllm.orders import Queued, Ticket

__all__ = ["Renewing"]

_log = logging.getLogger("aiokv")

#: How often it is said while the prefill side holds something: one that is lost, or late, does no harm.
_TIMES = 3
#: Seconds between two times at least, whatever a request says of its prefill side.
_LEAST = 0.1


@dataclass(slots=True)
class _Renewal:
    """One transfer.

    Attributes:
        queued: The order.
        period: Seconds from one time to the next.
        due: When it is to be said next, on the loop's clock.
    """

    queued: Queued
    period: float
    due: float


class Renewing:
    """Belongs to the loop's thread. No timer is set while nothing is in the queue.

    Args:
        engine: The transfer engine.
        hold: Seconds for which a prefill side is taken to hold what nobody wants, if it doesn't say.
    """

    def __init__(self, engine: TransferEngine, hold: float) -> None:
        self._engine = engine
        self._hold = hold
        #: What is in the queue, by id and attempt.
        self._renewals: dict[tuple[str, int], _Renewal] = {}
        #: Set for the first that is due, and when that is; None while nothing is.
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def begin(self, queued: Queued) -> None:
        """Say it now, unless the transfer begins in this turn of the loop, and from then on."""
        period = max(_LEAST, (self._hold if queued.hold is None else queued.hold) / _TIMES)
        now = asyncio.get_running_loop().time()
        self._renewals[_key(queued.ticket)] = _Renewal(queued, period, now)
        self._set(now)

    def end(self, ticket: Ticket) -> None:
        """The transfer begins, or nobody wants it any more."""
        self._renewals.pop(_key(ticket), None)
        if not self._renewals:
            self.close()

    def close(self) -> None:
        """Say nothing any more."""
        self._renewals.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        if self._timer is not None and due >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = asyncio.get_running_loop().call_at(due, self._say), due

    def _say(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for key, renewal in list(self._renewals.items()):
            if renewal.due > now:
                continue
            queued, renewal.due = renewal.queued, now + renewal.period
            ticket = queued.ticket
            try:
                self._engine.renew(ticket.transfer, sources=queued.sources, attempt=ticket.attempt)
            except CapacityError as error:  # for the moment
                _log.debug("transfer %s can't be renewed now: %s", ticket.transfer, error)
            except (AiokvError, TypeError, ValueError) as error:  # as the fetch will find, which says so
                _log.debug("transfer %s can't be renewed: %s", ticket.transfer, error)
                del self._renewals[key]
        if self._renewals:
            self._set(min(renewal.due for renewal in self._renewals.values()))


def _key(ticket: Ticket) -> tuple[str, int]:
    return ticket.transfer, ticket.attempt
