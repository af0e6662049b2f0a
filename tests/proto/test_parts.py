"""The table of a part's life: whatever happens to it in whatever order, it ends once and stays so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiokv.errors import LocalProtocolError, PeerLostError, TransferAborted
from aiokv.proto.parts import ENDED, OUTCOMES, TABLE, Event, Life, State, diagram

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"

#: The shortest way to each state.
WAYS: dict[State, tuple[Event, ...]] = {
    State.OFFERED: (),
    State.GRANTED: (Event.GRANT,),
    State.MOVING: (Event.GRANT, Event.MOVE),
    State.DRAINING: (Event.GRANT, Event.MOVE, Event.DONE),
    State.LANDED: (Event.GRANT, Event.MOVE, Event.DONE, Event.QUIET),
    State.FAILED: (Event.FAIL,),
    State.ABORTED: (Event.ABORT,),
}


def life_in(state: State) -> Life:
    life = Life()
    for event in WAYS[state]:
        life.on(event)
    assert life.state is state
    return life


# -- the table itself -------------------------------------------------------------------------------


def test_no_state_that_ended_has_an_exit() -> None:
    assert not [state for state, _ in TABLE if state in ENDED]


def test_what_moves_leaves_through_draining_only() -> None:
    for state in (State.GRANTED, State.MOVING):
        found = {following for (before, _), following in TABLE.items() if before is state}
        assert found <= {State.MOVING, State.DRAINING}


def test_each_state_is_reached() -> None:
    assert {*TABLE.values(), *OUTCOMES.values(), State.OFFERED} == set(State)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", [event for event in Event if event is not Event.QUIET])
def test_an_event_leads_where_the_table_says_or_is_refused(state: State, event: Event) -> None:
    life = life_in(state)
    following = TABLE.get((state, event))
    if following is None:
        with pytest.raises(LocalProtocolError, match=f"in state {state.value} can't take {event.value}"):
            life.on(event)
        assert life.state is state
    else:
        assert life.on(event) is following
        assert life.state is following


@pytest.mark.parametrize("state", [state for state in State if state is not State.DRAINING])
def test_only_what_drains_becomes_quiet(state: State) -> None:
    life = life_in(state)
    with pytest.raises(LocalProtocolError, match=f"in state {state.value} can't become quiet"):
        life.on(Event.QUIET)
    assert life.state is state


@pytest.mark.parametrize("settling", OUTCOMES)
@pytest.mark.parametrize("later", OUTCOMES)
def test_the_first_outcome_stays(settling: Event, later: Event) -> None:
    life = life_in(State.MOVING)
    first, second = PeerLostError("first"), TransferAborted("second")
    life.on(settling, first)
    assert life.on(later, second) is State.DRAINING
    assert life.error is first
    assert life.on(Event.QUIET) is OUTCOMES[settling]
    assert life.ended


@pytest.mark.parametrize("event", [Event.ABORT, Event.FAIL])
def test_what_was_never_granted_ends_at_once(event: Event) -> None:
    life = Life()
    error = TransferAborted("enough")
    assert life.on(event, error) is OUTCOMES[event]
    assert life.ended
    assert life.outcome is life.state
    assert life.error is error


# -- the diagram ------------------------------------------------------------------------------------

_EDGE = re.compile(r"\s*(\S+) --> (\S+?)(?:: (\w+))?\s*$")


def edges(mermaid: str) -> set[tuple[str, str, str]]:
    found = {match.groups(default="") for line in mermaid.splitlines() if (match := _EDGE.match(line))}
    return {(before, after, event) for before, after, event in found}


def test_the_diagram_is_the_table() -> None:
    drawn = edges(diagram())
    moves = {(s.value, f.value, e.value) for (s, e), f in TABLE.items() if s is not f}
    ends = {("draining", o.value, "quiet") for o in OUTCOMES.values()}
    stops = {(o.value, "[*]", "") for o in ENDED}
    assert drawn == moves | ends | stops | {("[*]", "offered", "")}


@pytest.mark.skipif(not PROTOCOL.exists(), reason="there is no docs/protocol.md here")
def test_the_documents_show_the_table() -> None:
    blocks = re.findall(r"```mermaid\n(.*?)```", PROTOCOL.read_text("utf-8"), re.DOTALL)
    states = [block for block in blocks if block.lstrip().startswith("stateDiagram")]
    assert [edges(block) for block in states] == [edges(diagram())]


# -- anything in any order --------------------------------------------------------------------------


class AnyLife(RuleBasedStateMachine):
    """Fires events at a part; one outcome comes out, whatever the order."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()
        self.settled: State | None = None
        self.error: TransferAborted | None = None
        self.ended: State | None = None

    @rule(event=st.sampled_from([event for event in Event if event is not Event.QUIET]))
    def fire(self, event: Event) -> None:
        before, error = self.life.state, TransferAborted(event.value)
        legal = (before, event) in TABLE
        try:
            self.life.on(event, error)
        except LocalProtocolError:
            assert not legal
            assert self.life.state is before
            return
        assert legal
        if event in OUTCOMES and self.settled is None:
            self.settled, self.error = OUTCOMES[event], error

    @rule()
    @precondition(lambda self: self.life.state is State.DRAINING)
    def quiet(self) -> None:
        assert self.life.on(Event.QUIET) is self.settled

    @rule()
    @precondition(lambda self: self.life.state is not State.DRAINING)
    def quiet_too_early_or_twice(self) -> None:
        before = self.life.state
        with pytest.raises(LocalProtocolError):
            self.life.on(Event.QUIET)
        assert self.life.state is before

    @invariant()
    def one_outcome(self) -> None:
        assert self.life.outcome is self.settled
        assert self.life.error is self.error
        assert self.life.ended is (self.life.state in ENDED)
        if self.ended is not None:
            assert self.life.state is self.ended
        if self.life.ended:
            self.ended = self.life.state
            assert self.life.state is self.settled


TestAnyLife = AnyLife.TestCase
