"""Every transfer of a soak: what was promised, what each side said of its end, and whether that may be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from aiokv.testing.soak.orders import Ended, Move, Promised, Role
from aiokv.testing.soak.worker import SETTINGS

__all__ = ["Judge", "Side", "Transfer"]

#: What a side may take beyond its deadline and the drain bound (s): machines are busy.
_SLACK_S = 15.0

#: How a side may end; anything else is a fault.
_OUTCOMES = {
    "": "landed",
    "PeerLostError": "peer lost",
    "DeadlineExceeded": "deadline",
    "TransferAborted": "aborted",
    "Refused": "refused",
    "ClosedError": "engine closed",
    "NoRoom": "no room",
    "NotBegun": "not begun",
    "killed": "killed",
}


@dataclass(slots=True, eq=False)
class Side:
    """One side of a transfer."""

    role: Role
    tid: str
    #: When it has to be over (s); moves on while its process is stopped.
    due: float
    issued: float
    ended: Ended | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """Both sides, and what the producer said it would write."""

    sides: dict[Role, Side]
    promised: str = ""
    #: Whether the producer's process ended before it could promise anything.
    dumb: bool = False


@dataclass(slots=True)
class Judge:
    """Counts what may happen, and collects what may not.

    Attributes:
        wrong: What may not happen and did, in words.
        outcomes: Sides by role and how they ended.
        transfers: Transfers that are not over on both sides, by id.
    """

    wrong: list[str] = field(default_factory=list)
    #: What workers said of what goes on, when something was wrong.
    explained: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    begun: int = 0
    #: Transfers whose bytes were compared, and the bytes.
    verified: int = 0
    verified_bytes: int = 0
    #: Transfers that landed of which nobody could say any more what they should hold.
    unverified: int = 0
    by_transport: Counter[str] = field(default_factory=Counter)
    #: The most that any side took beyond its deadline (s), time in which it was stopped included.
    latest_s: float = 0.0

    def begin(self, order: Move, now: float) -> Side:
        """A side was told to begin."""
        self.begun += order.role == "producer"
        transfer = self.transfers.setdefault(order.tid, Transfer({}))
        due = now + order.deadline_s + SETTINGS.drain_ns / 1e9 + _SLACK_S
        side = transfer.sides[order.role] = Side(order.role, order.tid, due, now)
        return side

    def promise(self, said: Promised) -> None:
        """A producer says what it will write."""
        if said.tid in self.transfers:
            self.transfers[said.tid].promised = said.digest

    def end(self, said: Ended, deadline_s: float = 0.0) -> None:
        """A side is over."""
        transfer = self.transfers.get(said.tid)
        if transfer is None or said.role not in transfer.sides:
            self.wrong.append(f"{said.role} of {said.tid} ended twice")
            return
        transfer.sides[said.role].ended = said
        if said.error not in _OUTCOMES:
            self.wrong.append(f"{said.role} of {said.tid} ended with {said.error}: {said.text}")
        self.outcomes[f"{said.role}: {_OUTCOMES.get(said.error, said.error)}"] += 1
        self.latest_s = max(self.latest_s, said.took_s - deadline_s)
        if all(side.ended is not None for side in transfer.sides.values()) and len(transfer.sides) == 2:
            del self.transfers[said.tid]
            self._compare(said.tid, transfer)

    def _compare(self, tid: str, transfer: Transfer) -> None:
        producer, consumer = transfer.sides["producer"].ended, transfer.sides["consumer"].ended
        assert producer is not None
        assert consumer is not None
        if not producer.error and consumer.error not in ("", "killed"):
            self.wrong.append(f"{tid} landed at its producer, and its consumer ended with {consumer.error}")
        if consumer.error:
            return
        self.by_transport[consumer.transport] += 1
        if not transfer.promised:
            self.unverified += 1
        elif transfer.promised != consumer.digest:
            self.wrong.append(f"{tid}: wrong bytes by {consumer.transport}; the producer: {producer.error}")
        else:
            self.verified += 1
            self.verified_bytes += consumer.nbytes
