"""Who is in the registry, with a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiokv.router.messages import Load, Report
from aiokv.router.registry import Registry, checked_url

S = 1_000_000_000


def report(who: int = 1, number: int = 1, **more: Any) -> Report:
    fields: dict[str, Any] = {
        "incarnation": bytes([who]) * 16,
        "number": number,
        "role": "prefill",
        "address": f"memory://{who}",
        "http": f"http://127.0.0.1:{8000 + who}",
        "engines": (f"tcp://127.0.0.1:{9000 + who}",),
        "models": ("m",),
        "fingerprint": "f",
        "context": 0,
        "interval": 1.0,
        "draining": False,
        "token": "t",
        "probe": "",
        "load": Load(),
        **more,
    }
    return Report(**fields)


def joined(registry: Registry, who: int, now: int = 0, **more: Any) -> bytes:
    answer = registry.report(report(who, **more), now)
    assert answer.member is not None and answer.ask
    registry.verified(answer.member.incarnation)
    return answer.member.incarnation


def pair(registry: Registry, now: int = 0, **more: Any) -> tuple[bytes, bytes]:
    return joined(registry, 1, now, **more), joined(registry, 2, now, role="decode", **more)


def test_nobody_is_chosen_before_it_was_found_where_it_says() -> None:
    registry = Registry()
    for who, role in ((1, "prefill"), (2, "decode")):
        registry.report(report(who, role=role), 0)
    assert registry.groups("m") == []
    assert registry.models() == []
    registry.unverified(bytes([1]) * 16, "nobody there")
    assert registry.report(report(1, 2), S).ask  # once more with each report
    for who in (1, 2):
        registry.verified(bytes([who]) * 16)
    (group,) = registry.groups("m")
    assert len(group.prefills) == len(group.decodes) == 1


def test_time_to_live_is_three_intervals_also_when_nobody_else_reports() -> None:
    registry = Registry()
    joined(registry, 1, interval=2.0)
    assert registry.next_at() == 6 * S
    assert registry.sweep(6 * S - 1) == []
    (gone,) = registry.sweep(6 * S)
    assert gone.incarnation == bytes([1]) * 16
    assert registry.members == {} and registry.next_at() is None


def test_two_lost_reports_cost_nothing() -> None:
    registry = Registry()
    joined(registry, 1)
    for number in range(2, 50):
        now = (number - 1) * 3 * S - number  # each third one arrives
        assert registry.sweep(now) == []
        assert registry.report(report(1, number), now).member is not None


def test_a_clock_that_goes_back_shortens_no_life() -> None:
    registry = Registry()
    joined(registry, 1, 100 * S)
    registry.report(report(1, 2), 10 * S)
    assert registry.next_at() == 103 * S


def test_after_a_stall_of_the_router_nobody_is_gone_for_it() -> None:
    registry = Registry()
    joined(registry, 1)
    registry.stalled(100 * S)
    assert registry.sweep(100 * S) == []
    assert registry.next_at() == 103 * S


def test_an_overtaken_report_changes_nothing() -> None:
    registry = Registry()
    joined(registry, 1, number=5)
    answer = registry.report(report(1, 4, draining=True), S)
    assert answer == (None, "", False)
    assert registry.next_at() == 3 * S


def test_registering_twice_is_once() -> None:
    registry = Registry()
    joined(registry, 1)
    registry.report(report(1, 2), 0)
    assert len(registry.members) == 1


def test_another_process_at_the_same_address_takes_over_only_when_it_is_there() -> None:
    registry = Registry()
    old = joined(registry, 1)
    answer = registry.report(report(7, http="http://127.0.0.1:8001"), S)
    assert answer.member is not None
    registry.unverified(answer.member.incarnation, "somebody else is there")
    assert registry.members[old].verified
    (gone,) = registry.verified(answer.member.incarnation)
    assert gone.incarnation == old
    assert list(registry.members) == [answer.member.incarnation]
    assert "another one" in registry.report(report(1, 2), S).why  # or the two would take turns
    assert list(registry.members) == [answer.member.incarnation]


@pytest.mark.parametrize(
    "field", ["role", "http", "models", "fingerprint", "engines", "address", "token", "probe"]
)
def test_what_an_incarnation_is_does_not_change(field: str) -> None:
    registry = Registry()
    joined(registry, 1)
    other = {"role": "decode", "models": ("n",), "engines": ("n",)}.get(field, "http://127.0.0.1:1")
    answer = registry.report(report(1, 2, **{field: other}), S)
    assert answer.member is None and field in answer.why
    assert registry.next_at() == 3 * S  # and the spoofed report kept nobody alive


def test_nobody_speaks_with_another_key() -> None:
    registry = Registry()
    answer = registry.report(report(1), 0, "mine")
    assert answer.member is not None
    assert "another key" in registry.report(report(1, 2), 0, "other").why
    assert registry.bye(answer.member.incarnation, "other") is None
    assert registry.bye(answer.member.incarnation, "mine") is answer.member


def test_goodbye_is_for_good() -> None:
    registry = Registry()
    who = joined(registry, 1)
    assert registry.bye(who) is not None
    assert registry.bye(who) is None
    assert "goodbye" in registry.report(report(1, 2), 0).why
    assert registry.members == {}


def test_one_that_was_only_silent_may_come_back() -> None:
    registry = Registry()
    joined(registry, 1)
    registry.sweep(3 * S)
    assert registry.report(report(1, 9), 4 * S).ask


def test_who_drains_or_cannot_be_reached_is_passed_over() -> None:
    registry = Registry()
    one, _ = pair(registry)
    registry.suspect(one)
    assert registry.groups("m") == []
    assert "no prefill instance" in registry.lacking("m")
    assert registry.report(report(1, 2), 0).ask  # it lives; its server may not
    assert registry.groups("m") == []
    registry.verified(one)
    assert registry.groups("m")
    registry.report(report(1, 3, draining=True), 0)
    assert registry.groups("m") == []
    registry.report(report(2, 3, role="decode", draining=True), 0)
    assert "draining" in registry.lacking("m")


def test_models_and_layouts_are_not_mixed() -> None:
    registry = Registry()
    joined(registry, 1, models=("a",))
    joined(registry, 2, models=("b",), role="decode")
    assert registry.groups("a") == registry.groups("b") == []
    joined(registry, 3, models=("a",), role="decode", fingerprint="other")
    assert registry.groups("a") == []
    assert "same KV layout" in registry.lacking("a")
    joined(registry, 4, models=("a", "b"), role="decode")
    (group,) = registry.groups("a")
    assert [each.http for each in group.decodes] == ["http://127.0.0.1:8004"]
    assert registry.models() == ["a", "b"]


def test_those_of_the_last_attempt_can_be_left_out() -> None:
    registry = Registry()
    one, _ = pair(registry)
    assert registry.groups("m", [registry.members[one]]) == []


def test_a_bound_on_members() -> None:
    registry = Registry(most=1)
    joined(registry, 1)
    assert "already" in registry.report(report(2), 0).why


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:80",
        "ftp://127.0.0.1:80",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://user@127.0.0.1:80",
        "http://127.0.0.1:80/path",
        "http://127.0.0.1:80?x",
        "http://127.0.0.1:80\r\nX: y",
        "http://[::1:80",
    ],
)
def test_an_http_address_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        checked_url(url)
    assert Registry().report(report(1, http=url), 0).why


def test_a_prefill_without_an_engine_is_refused() -> None:
    assert "transfer engine" in Registry().report(report(1, engines=()), 0).why


def test_load_tells_the_transfer_rate() -> None:
    registry = Registry()
    who = joined(registry, 1)
    registry.report(report(1, 2, load=Load(bytes_moved=3000)), 2 * S)
    assert registry.members[who].rate == 1500
    registry.report(report(1, 3, load=Load(bytes_moved=0)), 3 * S)  # never below zero
    assert registry.members[who].rate == 0


class Machine(RuleBasedStateMachine):
    """Whatever happens in whatever order: who is chosen was heard within its time and is as it says."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(most=4)
        self.now = 0
        self.heard: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.left: set[int] = set()

    @rule(who=st.integers(1, 6), draining=st.booleans(), passed=st.integers(0, S))
    def beat(self, who: int, draining: bool, passed: int) -> None:
        self.now += passed
        number = self.numbers[who] = self.numbers.get(who, 0) + 1
        role = "prefill" if who % 2 else "decode"
        answer = self.registry.report(report(who, number, role=role, draining=draining), self.now)
        if answer.member is not None:
            assert who not in self.left
            self.heard[who] = self.now

    @rule(who=st.integers(1, 6))
    def verify(self, who: int) -> None:
        self.registry.verified(bytes([who]) * 16)

    @rule(who=st.integers(1, 6))
    def leave(self, who: int) -> None:
        if self.registry.bye(bytes([who]) * 16):
            self.left.add(who)

    @rule(passed=st.integers(0, 4 * S))
    def sweep(self, passed: int) -> None:
        self.now += passed
        for gone in self.registry.sweep(self.now):
            assert self.now - self.heard[gone.incarnation[0]] >= 3 * S

    @invariant()
    def nobody_is_overdue_after_a_sweep(self) -> None:
        self.registry.sweep(self.now)
        at = self.registry.next_at()
        assert at is None or at > self.now
        assert len(self.registry.members) <= 4
        for group in self.registry.groups("m"):
            for each in group.prefills + group.decodes:
                assert each.verified and not each.report.draining
                assert self.now - self.heard[each.incarnation[0]] < 3 * S
            assert {each.role for each in group.prefills} == {"prefill"}


TestMachine = Machine.TestCase
