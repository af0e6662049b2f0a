"""The life of a part: one producer's share of a transfer to one consumer, as a table.

Both sides run the same table over their own half of a part. An event that has no entry is a
mistake of the calling code and raises; what a peer may send too late is filtered before. The
diagram in docs/protocol.md is made from ``TABLE`` by ``diagram()``, and a test holds them equal.
"""

from __future__ import annotations

import enum
from types import MappingProxyType

from aiokv.errors import AiokvError, LocalProtocolError

__all__ = ["ENDED", "TABLE", "Event", "Life", "State", "diagram"]


class State(enum.Enum):
    """Where a part is in its life."""

    #: Producer: not claimed yet. Consumer: not asked for yet. Nothing is promised.
    OFFERED = "offered"
    #: The destination is reserved and the other side knows, or is being told. No byte may move yet.
    GRANTED = "granted"
    #: Bytes may be in flight.
    MOVING = "moving"
    #: The outcome is settled; something in flight may still touch the blocks.
    DRAINING = "draining"
    #: Everything arrived.
    LANDED = "landed"
    #: It went wrong: an error, a deadline, a lost peer.
    FAILED = "failed"
    #: Somebody gave it up.
    ABORTED = "aborted"

    # By identity, which is what equality is here: Enum's own hashes the name, in Python.
    __hash__ = object.__hash__


class Event(enum.Enum):
    """What can happen to a part."""

    #: A grant matched (producer), or was sent (consumer).
    GRANT = "grant"
    #: From now on bytes may move.
    MOVE = "move"
    #: Everything is in place: the last copy completed (consumer), LANDED came (producer).
    DONE = "done"
    #: One of the two sides gives it up.
    ABORT = "abort"
    #: An error, a refusal, a deadline or the loss of the peer.
    FAIL = "fail"
    #: Nothing in flight can touch the blocks any more.
    QUIET = "quiet"

    __hash__ = object.__hash__


#: States without exit.
ENDED = frozenset({State.LANDED, State.FAILED, State.ABORTED})

_S, _E = State, Event

#: (state, event) to the next state. Leaving DRAINING leads to the outcome that was settled on
#: entering it; the entry names DRAINING itself where the outcome stays as it is.
TABLE = MappingProxyType(
    {
        (_S.OFFERED, _E.GRANT): _S.GRANTED,
        (_S.OFFERED, _E.ABORT): _S.ABORTED,
        (_S.OFFERED, _E.FAIL): _S.FAILED,
        (_S.GRANTED, _E.MOVE): _S.MOVING,
        (_S.GRANTED, _E.DONE): _S.DRAINING,
        (_S.GRANTED, _E.ABORT): _S.DRAINING,
        (_S.GRANTED, _E.FAIL): _S.DRAINING,
        (_S.MOVING, _E.MOVE): _S.MOVING,
        (_S.MOVING, _E.DONE): _S.DRAINING,
        (_S.MOVING, _E.ABORT): _S.DRAINING,
        (_S.MOVING, _E.FAIL): _S.DRAINING,
        (_S.DRAINING, _E.DONE): _S.DRAINING,
        (_S.DRAINING, _E.ABORT): _S.DRAINING,
        (_S.DRAINING, _E.FAIL): _S.DRAINING,
    }
)

#: The outcome that an event settles.
OUTCOMES = MappingProxyType({_E.DONE: _S.LANDED, _E.ABORT: _S.ABORTED, _E.FAIL: _S.FAILED})


class Life:
    """The state of one part on one side, moved by events through the table."""

    __slots__ = ("error", "outcome", "state")

    def __init__(self) -> None:
        self.state = State.OFFERED
        #: What the part will end as; None until it is settled, then never changed.
        self.outcome: State | None = None
        #: Why, unless the outcome is LANDED.
        self.error: AiokvError | None = None

    @property
    def ended(self) -> bool:
        """Whether the part is in a state without exit."""
        return self.state in ENDED

    def on(self, event: Event, error: AiokvError | None = None) -> State:
        """Take one event and return the new state.

        The first event that settles an outcome wins; later ones are legal and change nothing, since
        both sides may settle at the same time.

        Raises:
            LocalProtocolError: The table has no entry for this event in this state.
        """
        if event is Event.QUIET:
            if self.state is not State.DRAINING or self.outcome is None:
                raise LocalProtocolError(f"a part in state {self.state.value} can't become quiet")
            self.state = self.outcome
            return self.state
        following = TABLE.get((self.state, event))
        if following is None:
            raise LocalProtocolError(f"a part in state {self.state.value} can't take {event.value}")
        if event in OUTCOMES and self.outcome is None:
            self.outcome = OUTCOMES[event]
            self.error = error
        self.state = following
        return following


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> offered"]
    for (state, event), following in TABLE.items():
        if state is not following:
            lines.append(f"    {state.value} --> {following.value}: {event.value}")
    for outcome in (State.LANDED, State.FAILED, State.ABORTED):
        lines.append(f"    draining --> {outcome.value}: quiet")
        lines.append(f"    {outcome.value} --> [*]")
    return "\n".join(lines)
