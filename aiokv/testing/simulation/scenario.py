"""What happens in one simulated world, in words.

A scenario says which engines there are, who offers and fetches what and when, how each of them misbehaves,
and what the world does to them. It holds no code and no state, so that parts of it can be left out to find
out which of them a failure needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import Settings
from aiokv.testing.faultynetwork import Faults

__all__ = [
    "FAST_S",
    "MOST_SILENCE_S",
    "Fault",
    "FaultKind",
    "FetchPlan",
    "OfferPlan",
    "Rank",
    "Request",
    "Scenario",
    "Side",
]

FaultKind = Literal[
    "freeze", "jump", "kill", "close", "cut", "cut off", "noise", "unlink", "stall device", "fail device"
]

#: How a user goes about a transfer. "with": async with. "start": start, wait, cancel.
Style = Literal["with", "start"]

#: Silence that nobody may be given up for, less than the bounds of first contact and liveness (s).
MOST_SILENCE_S = 1.5
#: A device that takes less for a step (s) is done with all that may be in flight in no time.
FAST_S = 0.0005
#: Jumps of the time that are long enough to be noticed as one's own fault (s).
NOTICED_S = 1.0
#: Time that may be lost before deadlines of half a minute can't be kept (s).
MOST_LOST_S = 20.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine."""

    number: int
    layout: CacheLayout
    #: Layout of its next lives, where that is another one.
    next_layout: CacheLayout
    #: May offer; may fetch.
    produces: bool
    consumes: bool
    #: Seconds between steps of its device, on average.
    step_s: float

    @property
    def address(self) -> str:
        """Of its control channel."""
        return f"memory://e{self.number}"

    @property
    def alias(self) -> str:
        """Another name of the same, as localhost is of 127.0.0.1."""
        return f"memory://also-e{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SidePlan:
    rank: int
    #: Seconds from the beginning.
    start: float
    deadline: float = 30.0
    #: Seconds from its start at which its task is cancelled.
    cancels: tuple[float, ...] = ()
    #: Seconds after which ``asyncio.timeout`` strikes; 0 without.
    timeout: float = 0.0
    #: The body raises before this layer; -1: it doesn't.
    raises: int = -1
    style: Style = "with"
    #: It calls the engines that it names by what they don't call themselves.
    alias: bool = False
    seed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPlan(_SidePlan):
    """A producer's side of a request."""

    readers: int
    #: Ranks that are told of it (push).
    to: tuple[int, ...] = ()
    #: Seconds for which it waits for who says nothing; 0: until the deadline.
    hold: float = 0.0
    #: Seconds that the model takes for a layer, on average.
    pace: float = 0.001
    #: How layers are announced: as they are computed, in another order, or all when the body is left.
    order: Literal["forward", "shuffled", "late"] = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan(_SidePlan):
    """A consumer's side of a request."""

    #: Ranks to fetch from; None: wait for ``parts`` offers that name this one.
    sources: tuple[int, ...] | None
    parts: int = 1
    first_token: int = 0
    #: None: as many as are offered.
    tokens: int | None = None
    #: Tokens that the blocks have room for.
    room: int = 0
    priority: int = 0
    #: What the body does: nothing, layers as they land, layers in order, ordered on the stream, many waiters.
    body: Literal["nothing", "layers", "each", "ordered", "waiters"] = "nothing"
    #: Seconds that it waits for blocks before it fetches, in which it says that it will.
    queued: float = 0.0
    #: How often it says so, in seconds.
    period: float = 1.0
    #: The caller's stream has work on the blocks when the fetch begins.
    busy: bool = False


#: One engine's side of a request.
Side = OfferPlan | FetchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One transfer id, and all who take part."""

    tid: str
    attempt: int = 0
    tokens: int
    offers: tuple[OfferPlan, ...]
    fetches: tuple[FetchPlan, ...]
    #: Somebody does what can't end well; what becomes of it isn't asked.
    odd: bool = False
    #: Whether a router would try again after a failure.
    retry: bool = False

    @property
    def sides(self) -> tuple[Side, ...]:
        """Offers, then fetches."""
        return (*self.offers, *self.fetches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that the world does to engines."""

    at: float
    kind: FaultKind
    rank: int = 0
    other: int = 0
    #: Seconds until it is over: thawed, healed, started again; 0: never.
    lasts: float = 0.0
    #: For each kind its own: both ways or not, frames kept or not, another layout or not.
    flag: bool = False
    second_flag: bool = False
    noise: Faults = field(default_factory=Faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that is decided before the world begins."""

    seed: str
    settings: Settings
    ranks: tuple[Rank, ...]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    channel: Faults
    #: "memory": consumers read. "sent": producers send. Best first.
    transports: tuple[str, ...] = ("memory",)

    def addresses(self, numbers: tuple[int, ...], *, alias: bool) -> list[str]:
        """What some ranks are called."""
        return [self.ranks[n].alias if alias else self.ranks[n].address for n in numbers]

    @property
    def quiet(self) -> bool:
        """Nothing at all is done to the engines, their devices are fast, and the network loses nothing."""
        fast = all(rank.step_s < FAST_S for rank in self.ranks)
        return fast and not self.faults and not self.channel.drop and not self.channel.reorder

    @property
    def calm(self) -> bool:
        """Nothing happens that could make a well-meant transfer fail.

        Nobody is declared dead for a silence that is shorter than the bounds, nor for one's own: a process
        that stands still for a while, frames that come late, and time that jumps for all do no harm.
        """
        if self.channel.drop or self.channel.reorder:
            return False
        silent = jumps = 0.0
        for fault in self.faults:
            held = fault.kind in ("cut", "cut off") and fault.second_flag
            # A short jump is not noticed, so it counts as the others' silence.
            if fault.kind == "freeze" or held or (fault.kind == "jump" and fault.lasts < NOTICED_S):
                silent += fault.lasts
            elif fault.kind in ("jump", "stall device"):
                jumps += fault.lasts
            else:
                return False
        return silent < MOST_SILENCE_S and silent + jumps < MOST_LOST_S
