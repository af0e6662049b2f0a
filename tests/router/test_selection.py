"""Which instances are chosen."""

from __future__ import annotations

import random

import pytest

from aiokv.router.messages import Load, Report
from aiokv.router.registry import Group, Member
from aiokv.router.selection import LeastLoaded


def member(number: int, busy: int = 0, served: int = 0) -> Member:
    report = Report(
        incarnation=bytes([number]) * 16,
        number=1,
        role="prefill",
        address="",
        http=f"http://127.0.0.1:{8000 + number}",
        engines=("e",),
        models=("m",),
        fingerprint="",
        context=0,
        interval=1,
        draining=False,
        token="",
        probe="",
        load=Load(running=busy),
    )
    return Member(report, "", 0, 0, verified=True, served=served)


def group(prefills: list[Member], decodes: list[Member] | None = None) -> list[Group]:
    return [Group("", prefills, decodes or [member(100)])]


def test_the_least_loaded_are_taken() -> None:
    prefill, decode = LeastLoaded().choose(
        group([member(1, 3), member(2, 1)], [member(3, 0), member(4, 2)]), b"short"
    )
    assert (prefill.incarnation[0], decode.incarnation[0]) == (2, 3)


def test_what_was_sent_counts_before_the_next_report() -> None:
    one, other = member(1), member(2, 1)
    one.in_flight = 5
    assert LeastLoaded().choose(group([one, other]), b"")[0] is other


def test_among_equals_they_take_turns() -> None:
    one, other = member(1, served=3), member(2, served=2)
    assert LeastLoaded().choose(group([one, other]), b"")[0] is other


def test_prompts_that_begin_alike_go_to_the_same_prefill(seed: int) -> None:
    draw = random.Random(seed)
    members = [member(number) for number in range(8)]
    selection = LeastLoaded()
    for _ in range(50):
        beginning = draw.randbytes(600)
        chosen = {
            selection.choose(group(members), beginning + draw.randbytes(draw.randrange(99)))[0].http
            for _ in range(5)
        }
        assert len(chosen) == 1


def test_one_that_leaves_moves_only_what_was_its_own(seed: int) -> None:
    draw = random.Random(seed)
    members = [member(number) for number in range(6)]
    prompts = [draw.randbytes(512) for _ in range(300)]
    selection = LeastLoaded()
    before = [selection.choose(group(members), prompt)[0] for prompt in prompts]
    after = [selection.choose(group(members[1:]), prompt)[0] for prompt in prompts]
    assert all(old is new for old, new in zip(before, after, strict=True) if old is not members[0])
    assert len({each.http for each in after}) == 5  # and what was its own is spread


def test_affinity_gives_way_to_load(seed: int) -> None:
    members = [member(number) for number in range(3)]
    prompt = random.Random(seed).randbytes(512)
    favourite = LeastLoaded().choose(group(members), prompt)[0]
    favourite.in_flight = 10
    assert LeastLoaded().choose(group(members), prompt)[0] is not favourite


def test_the_less_crowded_group_is_taken() -> None:
    crowded, calm = Group("a", [member(1, 9)], [member(2, 9)]), Group("b", [member(3)], [member(4)])
    prefill, decode = LeastLoaded().choose([crowded, calm], b"")
    assert (prefill.incarnation[0], decode.incarnation[0]) == (3, 4)


@pytest.mark.parametrize("wrong", [{"block": 0}, {"blocks": 0}, {"slack": 0.5}, {"slack": float("nan")}])
def test_parameters_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        LeastLoaded(**wrong)  # type: ignore[arg-type]
