"""The nouns of the transfer table: transfers, their parts, and what is to be done about them.

A transfer has parts, one for each pair of engines. On the producer an ``Offering`` has as many
parts as readers; on the consumer a ``Fetching`` has as many as sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from aiokv.errors import AiokvError
from aiokv.proto.messages import Role
from aiokv.proto.parts import Life, State
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.session import Session

__all__ = ["Action", "ActionKind", "Fetching", "Heads", "Key", "Offering", "Part", "Transfer", "other_role"]

#: Transfer id and attempt.
Key = tuple[str, int]
#: For each group a half-open range of KV heads.
Heads = tuple[tuple[int, int], ...]


@dataclass(eq=False, slots=True, kw_only=True)
class Transfer:
    """What both kinds of transfer have."""

    tid: str
    attempt: int
    #: When it must be over, on this engine's clock (ns).
    deadline: int
    #: This engine's block lists, one for each group.
    blocks: tuple[GroupBlocks, ...]
    #: W3C trace context that travels along, or empty.
    trace: str = ""
    parts: list[Part] = field(default_factory=list)
    #: First error of a part; None while all is well.
    error: AiokvError | None = None
    #: All parts ended.
    resolved: bool = False

    @property
    def key(self) -> Key:
        """Id and attempt."""
        return self.tid, self.attempt

    @property
    def unclaimed(self) -> Part | None:
        """A part for whoever comes next; None where each has its peer, or has ended."""
        return next((part for part in self.parts if part.session is None and not part.ended), None)

    def has(self, life: bytes) -> bool:
        """Whether that life of a peer has, or had, a part."""
        return any(part.session is not None and part.session.life == life for part in self.parts)

    @property
    def unsure(self) -> bool:
        """A peer that was named has not answered yet, so it may be one that is known by another name."""
        sessions = [part.session for part in self.parts if not part.ended]
        return any(session is not None and not session.incarnation for session in sessions)

    def said(self, error: AiokvError | None) -> str:
        """What an error of this transfer says, for where it is clear which transfer is meant."""
        return str(error).removeprefix(f"transfer {self}: ")

    def __str__(self) -> str:
        return f"{self.tid!r}" + (f" attempt {self.attempt}" if self.attempt else "")


@dataclass(eq=False, slots=True, kw_only=True)
class Offering(Transfer):
    """A transfer's producer side."""

    #: Tokens offered.
    tokens: int
    #: How long a part waits for a reader that says nothing (ns); 0: until the deadline.
    hold: int = 0
    #: It is the beginning of something, the rest of which is offered apart.
    more: bool = False
    #: Layers ready so far, as a bit mask.
    ready: int = 0
    #: Whom it refused last, and why; empty while nobody was.
    refusal: str = ""

    def held_until(self, now: int) -> int:
        """When a part's wait is over, if its reader is heard of now and not again (ns)."""
        return min(self.deadline, now + self.hold) if self.hold else self.deadline


@dataclass(eq=False, slots=True, kw_only=True)
class Fetching(Transfer):
    """A transfer's consumer side."""

    #: Tokens before this one are there already.
    first_token: int = 0
    #: Tokens wanted; -1: as many as are offered.
    tokens: int = -1
    #: Tokens that this side's blocks have room for.
    capacity: int = 0
    #: Higher goes first.
    priority: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Part:
    """One pair of engines' share of a transfer, on one side."""

    transfer: Transfer
    role: Role
    #: None until it is known who the other side is.
    session: Session | None = None
    life: Life = field(default_factory=Life)
    #: When this part must be over (ns); the earlier of the two sides' deadlines as far as known.
    deadline: int = 0
    #: In DRAINING: when the consumer's lease on our blocks ends, 0 where no lease is out (ns).
    quiet_at: int = 0
    #: In DRAINING: when we give up waiting, 0 until the drain was first seen by a timer (ns).
    drain_by: int = 0
    #: In DRAINING, at a producer that sends: when what was not taken yet is taken back (ns), else 0.
    cut_at: int = 0
    link: str = ""
    link_id: bytes = b""
    one_sided: bool = True
    #: Consumer: a link to the producer is there. Producer: a named reader was told of the offer.
    linked: bool = False
    #: ACCEPT was sent (producer), or came (consumer): bytes may move.
    accepted: bool = False
    heads: Heads = ()
    first_token: int = 0
    #: Tokens that this part moves up to; -1 while that isn't known.
    tokens: int = -1
    #: The producer has more tokens to offer, under other ids.
    more: bool = False
    #: The other side's blocks; empty where they aren't needed or not known yet.
    peer_blocks: tuple[GroupBlocks, ...] = ()
    #: Layers that may be read (consumer) or that the consumer was told of (producer), as a bit mask.
    ready: int = 0
    #: Consumer: layers that are in place, as a bit mask.
    landed: int = 0
    #: The other side was told that we give up, or told us.
    abort_known: bool = False
    #: It ended without being quiet.
    quarantined: bool = False
    #: W3C trace context that came from the other side, or empty.
    peer_trace: str = ""

    @property
    def state(self) -> State:
        """Where the part is in its life."""
        return self.life.state

    @property
    def active(self) -> bool:
        """Whether the destination is reserved, and the outcome open."""
        return self.life.state in (State.GRANTED, State.MOVING)

    @property
    def settled(self) -> bool:
        """Whether the outcome is: the part drains, or is over."""
        return self.life.outcome is not None

    @property
    def ended(self) -> bool:
        """Whether the part is over."""
        return self.life.ended

    def remaining_us(self, now: int) -> int:
        """Microseconds until its deadline, as deadlines travel: clocks of two hosts don't compare."""
        return max(0, self.deadline - now) // 1000

    def __str__(self) -> str:
        peer = self.session.address if self.session else "nobody yet"
        return f"part of {self.transfer} with {peer} ({self.role}, {self.state.value})"


class ActionKind(Enum):
    """What the layer above has to do."""

    #: Bring up a session with the part's peer; at a consumer also a link to it. Then ``connected``.
    CONNECT = "connect"
    #: Both block lists are known: make the copy plan.
    START = "start"
    #: The layers in ``mask`` may be copied (consumer of a one-sided link) or sent (producer).
    MOVE = "move"
    #: Commit nothing more of this part, and report ``quiet`` once nothing is in flight.
    STOP = "stop"
    #: The consumer takes nothing: close the link, so that what it was given is read no more.
    CUT = "cut"
    #: The part ended without being quiet: its blocks stay leased for the engine's life.
    QUARANTINE = "quarantine"
    #: The part ended.
    ENDED = "ended"
    #: All parts of the part's transfer ended.
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Action:
    """Something for the layer above to do."""

    kind: ActionKind
    part: Part
    mask: int = 0


def other_role(role: Role) -> Role:
    """The role of who is at the other end."""
    return "consumer" if role == "producer" else "producer"
