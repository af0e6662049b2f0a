"""The policies' own order, and that what they remember is bounded."""

from __future__ import annotations

import pytest

from aiokv.offload.manager import BlockTable
from aiokv.offload.policies import Arc, Lru, SecondSight, policy_named


def fill(table: BlockTable, names: list[str]) -> None:
    for name in names:
        offered = table.offer([name])
        table.finish([place for _, place in offered.new], ok=True)


def use(table: BlockTable, names: list[str]) -> int:
    found = 0
    for name in names:
        places = table.lookup([name])
        table.release(places)
        found += len(places)
    return found


def test_policies_have_names() -> None:
    assert isinstance(policy_named("lru"), Lru)
    assert isinstance(policy_named("arc"), Arc)
    own = Lru()
    assert policy_named(own) is own
    with pytest.raises(ValueError, match="'fifo'"):
        policy_named("fifo")
    with pytest.raises(TypeError, match="policy"):
        policy_named(object())  # type: ignore[arg-type]


def test_arc_keeps_what_is_used_again_from_a_scan() -> None:
    kept = {}
    for name in ("lru", "arc"):
        table = BlockTable(policy_named(name))
        table.grow(32)
        hot = [f"hot{index}" for index in range(8)]
        fill(table, hot)
        use(table, hot)
        fill(table, [f"scan{index}" for index in range(200)])
        kept[name] = use(table, hot)
    assert kept == {"lru": 0, "arc": 8}


def test_arc_learns_from_what_went_too_early() -> None:
    arc = Arc()
    table = BlockTable(arc)
    table.grow(8)
    again = [f"again{index}" for index in range(6)]
    fill(table, again)
    use(table, again)
    once = [f"once{index}" for index in range(6)]
    fill(table, once)
    fill(table, once)
    assert use(table, once) >= 2
    assert use(table, again) < 6, "room was taken from what had been used more than once"


def test_ghosts_are_bounded() -> None:
    arc = Arc()
    table = BlockTable(arc)
    table.grow(100)
    fill(table, [f"key{index}" for index in range(20_000)])
    assert len(table) == 100
    assert arc.ghosts <= 100
    use(table, [f"key{index}" for index in range(19_900, 20_000)])
    fill(table, [f"more{index}" for index in range(1000)])
    assert arc.ghosts <= 100


def test_second_sight_remembers_no_more_than_told() -> None:
    seen = SecondSight(10)
    for index in range(1000):
        assert seen.admit([index]) == 0
    assert len(seen) == 10
    assert seen.admit([999]) == 1
    assert seen.admit([0]) == 0
    with pytest.raises(ValueError, match="positive"):
        SecondSight(0)
