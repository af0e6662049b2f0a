"""The simulation: seeds pass, the same happens each time, and faults that engines might have are found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from aiokv.engine.alarm import Alarm
from aiokv.engine.announcements import Announcements
from aiokv.engine.bell import Bell
from aiokv.engine.core import Core
from aiokv.engine.handle import Handle
from aiokv.errors import TransferAborted
from aiokv.proto.ledger import Ledger
from aiokv.proto.messages import Abort, Aborted
from aiokv.proto.parts import Event, State
from aiokv.proto.producer import Producer
from aiokv.proto.session import Phase, Session
from aiokv.proto.table import Table
from aiokv.proto.transfers import other_role
from aiokv.proto.waiting import Waiting
from aiokv.testing.simulation import Scenario, draw, play, run_seed
from aiokv.testing.simulation.drawing import MOODS, Mood
from aiokv.testing.simulation.shrink import shrink

#: Seeds that a test plays one after another.
CHUNK = 20


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_seeds_pass(first: int) -> None:
    for seed in range(first, first + CHUNK):
        report = run_seed(seed)
        again = f"python -m aiokv.testing.simulation --one {seed} -v"
        assert not report.failures, f"{report.failures[0]}\nreplay: {again}"


def test_a_seed_does_the_same_each_time() -> None:
    for seed in (3, 11, 25):
        first, second = run_seed(seed, verbose=True), run_seed(seed, verbose=True)
        assert first.trace == second.trace
        assert first.trace
        assert first.turns == second.turns


def test_scenarios_differ_and_cover_what_there_is() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert {fault.kind for scenario in drawn for fault in scenario.faults} == {
        "freeze", "jump", "kill", "close", "cut", "cut off", "noise", "unlink", "stall device", "fail device",
    }  # fmt: skip
    assert {len(scenario.ranks) for scenario in drawn} == {2, 3, 4, 5, 6}
    assert {scenario.transports for scenario in drawn} == {("memory",), ("sent",), ("memory", "sent")}
    requests = [request for scenario in drawn for request in scenario.requests]
    fetches = [fetch for request in requests for fetch in request.fetches]
    assert any(fetch.sources is None for fetch in fetches)
    assert any(len(fetch.sources or ()) > 1 for fetch in fetches)
    assert any(fetch.first_token == fetch.tokens for fetch in fetches)
    assert any(len(request.fetches) > 1 for request in requests)
    assert any(fetch.queued and not request.odd for request in requests for fetch in request.fetches)
    assert any(request.odd for request in requests)
    assert any(not request.odd for request in requests)
    heads = {rank.layout.groups[0].heads for scenario in drawn for rank in scenario.ranks}
    assert len(heads) > 5


@pytest.mark.parametrize("mood", MOODS)
def test_moods_can_be_asked_for(mood: Mood) -> None:
    assert not run_seed(1, mood=mood).failures


# -- engines with faults are found ------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def first_failing(mood: Mood, seeds: int) -> tuple[Scenario, str]:
    """The first scenario that fails, and how."""
    for seed in range(seeds):
        report = run_seed(seed, mood=mood)
        if report.failures:
            return report.scenario, report.failures[0]
    pytest.fail(f"none of {seeds} seeds failed")


def quiet_at_once(patch: pytest.MonkeyPatch) -> None:
    """A producer that gives its blocks back though a reader may still read them."""
    drain = Ledger._drain

    def broken(self, part, before, event):
        drain(self, part, before, event)
        if part.role == "producer":
            self.quiet(part)

    patch.setattr(Ledger, "_drain", broken)


def lease_ignored(patch: pytest.MonkeyPatch) -> None:
    """A consumer that believes what it read after its lease was over."""
    hold = Session.hold_lease

    def broken(self, until, now):
        hold(self, until, now)
        self.lease_held = 1 << 62

    patch.setattr(Session, "hold_lease", broken)


def lease_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A producer that doesn't wait for the end of a reader's lease."""
    draining = Ledger._draining

    def broken(self, part, now):
        if part.quiet_at:
            part.quiet_at = 1
        draining(self, part, now)

    patch.setattr(Ledger, "_draining", broken)


def released_before_drain(patch: pytest.MonkeyPatch) -> None:
    """A table that calls a part quiet while copies are in flight."""
    do = Core._do

    def broken(self, action):
        do(self, action)
        if action.kind.value == "stop":
            self.table.ledger.quiet(action.part)

    patch.setattr(Core, "_do", broken)


def announced_at_once(patch: pytest.MonkeyPatch) -> None:
    """A layer is announced before the stream that writes it came there."""
    patch.setattr(
        Announcements, "_watch", lambda self, offer, layer, stream, event: self._ready(offer, 1 << layer)
    )


def caller_stream_ignored(patch: pytest.MonkeyPatch) -> None:
    """Blocks are written while the caller's stream still works on them."""
    begun = Core._begun

    def broken(self, transfer, course, lease):
        course.after = None
        begun(self, transfer, course, lease)

    patch.setattr(Core, "_begun", broken)


def gaps_ignored(patch: pytest.MonkeyPatch) -> None:
    """Lost control messages are not noticed."""
    receive = Session.receive

    def broken(self, frame, now):
        self.next_receive = max(self.next_receive, frame.seq)
        return receive(self, frame, now)

    patch.setattr(Session, "receive", broken)


def duplicates_taken(patch: pytest.MonkeyPatch) -> None:
    """Control messages that come twice count twice."""
    receive = Session.receive

    def broken(self, frame, now):
        if self.phase is Phase.UP and frame.seq == self.next_receive - 1:
            self.next_receive -= 1
        return receive(self, frame, now)

    patch.setattr(Session, "receive", broken)


def silence_ignored(patch: pytest.MonkeyPatch) -> None:
    """Dead peers are not noticed."""
    timer, handle = Session.next_timer, Session.handle_timer
    patch.setattr(Session, "next_timer", lambda self: timer(self) if self.phase is Phase.CONTACT else None)
    patch.setattr(
        Session, "handle_timer", lambda self, now: handle(self, now) if self.phase is Phase.CONTACT else None
    )


def never_forgiving(patch: pytest.MonkeyPatch) -> None:
    """Who stood still himself calls his peers dead."""

    def broken(self):
        self._timer = None
        self._due(self._clock())

    patch.setattr(Alarm, "_on_timer", broken)


def deadlines_ignored(patch: pytest.MonkeyPatch) -> None:
    """Deadlines pass unnoticed."""
    add = Ledger.add_part

    def broken(self, *arguments):
        part = add(self, *arguments)
        part.deadline = 1 << 62
        return part

    patch.setattr(Ledger, "add_part", broken)


def abort_taken_for_landed(patch: pytest.MonkeyPatch) -> None:
    """A producer that counts as success what its reader gave up."""
    abort = Table._on_abort

    def broken(self, session, message):
        part = self.ledger.find(session, (message.tid, message.attempt), other_role(message.role))
        if part is not None and part.role == "producer" and part.state is not State.OFFERED:
            self.ledger.settle(part, Event.DONE)
        abort(self, session, message)

    patch.setattr(Table, "_on_abort", broken)


def unsent(kind: type) -> Break:
    def patched(patch: pytest.MonkeyPatch) -> None:
        send = Session.send
        patch.setattr(Session, "send", lambda self, m: None if isinstance(m, kind) else send(self, m))

    return patched


def left_early(patch: pytest.MonkeyPatch) -> None:
    """A cancelled caller gets its blocks back before they are quiet."""

    async def broken(self, error):
        self._course.observed = True
        if not self._transfer.resolved:
            self._core.abort(self._transfer, TransferAborted("given up"), "cancelled")

    patch.setattr(Handle, "_give_up", broken)


def one_is_woken(patch: pytest.MonkeyPatch) -> None:
    """Of several who wait one is told."""

    def broken(self):
        for waiter in [*self._waiters][:1]:
            if not waiter.done():
                waiter.set_result(None)

    patch.setattr(Bell, "ring", broken)


def lost_requests_kept(patch: pytest.MonkeyPatch) -> None:
    """What a dead peer asked for goes on waiting."""
    patch.setattr(Waiting, "lost", lambda self, session: None)


def refused_and_kept(patch: pytest.MonkeyPatch) -> None:
    """An offer that can't begin keeps its blocks."""

    def broken(self, offer, offering, sessions):
        lease = self.leases.take(offering.blocks, write=False)
        self.table.producer.offer(offering, sessions, self.clock())
        self._begun(offering, offer, lease)

    patch.setattr(Core, "begin_offer", broken)


def renewals_ignored(patch: pytest.MonkeyPatch) -> None:
    """Who says that it will come is not waited for."""
    patch.setattr(Producer, "on_renew", lambda self, session, renew, now: None)


@pytest.mark.parametrize(
    ("broken", "mood", "seeds"),
    [
        (quiet_at_once, "fickle", 40),
        (lease_ignored, "lease", 40),
        (lease_not_awaited, "lease", 40),
        (released_before_drain, "fickle", 40),
        (announced_at_once, "calm", 20),
        (caller_stream_ignored, "calm", 40),
        (gaps_ignored, "lease", 60),
        (duplicates_taken, "calm", 60),
        (silence_ignored, "any", 80),
        (never_forgiving, "patient", 80),
        (deadlines_ignored, "fickle", 40),
        (abort_taken_for_landed, "fickle", 40),
        (unsent(Abort), "lease", 60),
        (unsent(Aborted), "fickle", 60),
        (left_early, "fickle", 40),
        (one_is_woken, "calm", 20),
        (lost_requests_kept, "any", 120),
        (refused_and_kept, "any", 80),
        (renewals_ignored, "calm", 60),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_engine_is_found(
    monkeypatch: pytest.MonkeyPatch, broken: Break, mood: Mood, seeds: int
) -> None:
    broken(monkeypatch)
    first_failing(mood, seeds)


def test_a_failure_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    announced_at_once(monkeypatch)
    scenario, _ = first_failing("any", 20)
    report = shrink(scenario)
    assert report.failures
    assert report.trace
    assert len(report.scenario.requests) <= 1
    monkeypatch.undo()
    assert not play(report.scenario).failures
    with pytest.raises(ValueError, match="passes"):
        shrink(report.scenario)


# -- the command line -------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiokv.testing.simulation", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_many_seeds_by_the_command_line() -> None:
    done = command("--seeds", "30", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "0 of 30 seeds failed" in done.stdout


def test_one_seed_by_the_command_line() -> None:
    done = command("--one", "7", "-v")
    assert done.returncode == 0, done.stderr
    assert "all engines are up" in done.stdout
    assert "HELLO" in done.stdout
