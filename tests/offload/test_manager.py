"""The tier's index: what is found, what may go, and what is never taken."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from aiokv.errors import LocalProtocolError
from aiokv.offload.manager import BlockTable
from aiokv.offload.offered import Offered
from aiokv.offload.policies import Arc, Key, Lru, Policy, SecondSight


def table(places: int, policy: Policy | None = None, **more) -> BlockTable:
    made = BlockTable(policy or Lru(), **more)
    made.grow(places)
    return made


def keys(name: str, count: int, start: int = 0) -> list[str]:
    return [f"{name}{index}" for index in range(start, start + count)]


def store(to: BlockTable, offered: Sequence[Key], parent: Key | None = None) -> Offered:
    found = to.offer(offered, parent)
    to.finish([place for _, place in found.new], ok=True)
    return found


def found(where: BlockTable, wanted: Sequence[Key]) -> int:
    """How long the prefix is, used for a moment."""
    places = where.lookup(wanted)
    where.release(places)
    return len(places)


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_a_prefix_is_found_up_to_the_first_gap(policy: type[Policy]) -> None:
    held = table(8, policy())
    store(held, keys("a", 4))
    assert found(held, keys("a", 6)) == 4
    (second,) = held.lookup(["a1"])
    held.release([second])
    held.drop([second])
    assert found(held, keys("a", 4)) == 1, "what lies behind a gap is no part of the prefix"


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_tails_go_before_heads_whatever_was_stored_first(policy: type[Policy]) -> None:
    held = table(8, policy())
    tail, head = held.offer(keys("a", 3)), held.offer(keys("a", 3, 3), "a2")
    # The later part is written first.
    held.finish([place for _, place in head.new], ok=True)
    held.finish([place for _, place in tail.new], ok=True)
    store(held, ["b0", "b1"])
    gone: list[Key] = []
    for index in range(6):
        gone += store(held, [f"c{index}"]).evicted
    assert [key for key in gone if str(key).startswith("a")] == list(reversed(keys("a", 6)))[: len(gone)]


def test_the_longest_unused_goes_first() -> None:
    held = table(4)
    for name in "abcd":
        store(held, [name])
    assert found(held, ["a"]) == 1
    assert store(held, ["e", "f"]).evicted == ["b", "c"]


def test_a_head_that_was_used_lately_stays_when_its_tail_goes() -> None:
    held = table(6)
    store(held, keys("a", 4))
    store(held, ["b0", "b1"])
    assert found(held, keys("a", 2)) == 2
    assert store(held, keys("c", 4)).evicted == ["a3", "a2", "b1", "b0"]
    assert found(held, keys("a", 4)) == 2


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_what_is_used_or_offered_is_not_evicted(policy: type[Policy]) -> None:
    held = table(4, policy())
    store(held, ["a", "b"])
    store(held, ["c"])
    used = held.lookup(["c"])
    offered = held.offer(["a", "b", "x", "y", "z"])
    assert [index for index, _ in offered.new] == [2]
    assert (offered.kept, offered.refused, offered.evicted) == (3, 2, [])
    held.finish([place for _, place in offered.new], ok=True)
    held.release(used)
    assert found(held, ["c"]) == 1
    assert found(held, ["a", "b", "x"]) == 3


def test_what_is_continued_is_not_evicted_for_what_continues_it() -> None:
    held = table(2)
    store(held, ["a"])
    store(held, ["b"])
    assert store(held, ["a1"], parent="a").evicted == ["b"]


def test_a_pin_holds_until_it_is_left() -> None:
    held = table(2)
    store(held, ["a", "b"])
    used = held.lookup(["a", "b"])
    assert held.offer(["c"]).refused == 1
    held.release(used)
    assert store(held, ["c"]).evicted == ["b"]
    with pytest.raises(LocalProtocolError, match="more often"):
        held.release(used)


def test_what_is_being_stored_is_not_stored_twice() -> None:
    held = table(4)
    first = held.offer(["a", "b"])
    second = held.offer(["a", "b", "c"])
    assert second.pending == first.new
    assert [index for index, _ in second.new] == [2]
    assert held.pending == 3
    assert held.lookup(["a"]) == [first.new[0][1]]
    assert not held.ready(first.new[0][1])


def test_a_failed_store_is_gone_and_can_be_tried_again() -> None:
    held = table(2)
    failed = held.offer(["a", "b"])
    joined = held.lookup(["a", "b"])
    held.finish([place for _, place in failed.new], ok=False)
    assert "a" not in held
    assert held.offer(["a"]).refused == 1, "who joined it still uses its place"
    held.release(joined)
    assert store(held, ["a", "b"]).kept == 2
    assert found(held, ["a", "b"]) == 2


def test_a_reset_drops_all_and_places_come_back_when_they_are_left() -> None:
    held = table(3)
    store(held, ["a"])
    used = held.lookup(["a"])
    writing = held.offer(["b"])
    assert held.reset() == 2
    assert len(held) == 0
    assert held.free == 1
    held.finish([place for _, place in writing.new], ok=True)
    assert "b" not in held
    held.release(used)
    assert held.free == 3
    assert held.in_use == 0


def test_duplicates_are_refused_and_change_nothing() -> None:
    held = table(2)
    store(held, ["a"])
    with pytest.raises(ValueError, match="twice"):
        held.offer(["b", "b"])
    with pytest.raises(ValueError, match="twice"):
        held.lookup(["a", "a"])
    assert (held.in_use, held.free) == (0, 1)


def test_what_was_denied_holds_nothing() -> None:
    held = table(4, admission=SecondSight())
    assert store(held, ["a", "b"]).refused == 2
    assert (held.in_use, held.free, len(held)) == (0, 4, 0)
    assert store(held, ["a", "b", "c"]).kept == 2
    assert store(held, ["a", "b", "c"]).kept == 3


class Misbehaving(Lru):
    """Wrong in one way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def victims(self) -> Iterator[int]:
        if self.how == "raises":
            yield next(super().victims())
            raise RuntimeError("no")
        if self.how == "out of range":
            yield 10**6
        while self.how == "for ever":
            yield 0
        if self.how == "nothing":
            return
        yield from super().victims()

    def used(self, blocks: Sequence[int], *, hit: bool) -> None:
        if self.how == "used":
            raise RuntimeError("no")
        super().used(blocks, hit=hit)

    def freed(self, block: int) -> bool:
        if self.how == "freed":
            raise RuntimeError("no")
        return super().freed(block)


@pytest.mark.parametrize("how", ["raises", "out of range", "for ever", "used", "freed"])
def test_a_policy_that_misbehaves_is_replaced(how: str) -> None:
    told: list[Exception] = []
    held = table(4, Misbehaving(how), distrusted=told.append)
    store(held, ["a", "b"])
    store(held, ["c"])
    store(held, ["d"])
    used = held.lookup(["a", "b"])
    store(held, ["e", "f"])
    held.release(used)
    store(held, ["x", "y", "z"])
    assert len(told) == 1
    assert type(held.policy) is Lru
    assert len(held) + held.free == 4
    assert held.in_use == 0
    assert store(held, keys("z", 4)).kept == 4


def test_a_policy_that_lets_nothing_go_costs_what_is_new() -> None:
    held = table(2, Misbehaving("nothing"))
    store(held, ["a", "b"])
    assert store(held, ["c"]).refused == 1
    assert found(held, ["a", "b"]) == 2


def test_an_admission_that_raises_admits_all() -> None:
    class Broken:
        def admit(self, keys: Sequence[Key]) -> int:
            raise RuntimeError("no")

    told: list[Exception] = []
    held = table(2, admission=Broken(), distrusted=told.append)
    assert store(held, ["a"]).kept == 1
    assert len(told) == 1


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_at_random_it_stays_whole(policy: type[Policy], seed: int) -> None:  # noqa: C901
    """Whatever happens in whatever order: each place is one block's, and all come back in the end."""
    draw = random.Random(seed)
    held = table(24, policy())
    used: list[list[int]] = []
    writing: list[list[int]] = []
    for _ in range(3000):
        name, length = draw.choice("abcdef"), draw.randint(1, 12)
        start = draw.choice([0, 0, 0, 4])
        match draw.randrange(7):
            case 0 | 1:
                offered = held.offer(keys(name, length, start), f"{name}{start - 1}" if start else None)
                assert offered.kept + offered.refused == length
                assert not set(offered.evicted) & set(keys(name, length, start))
                if offered.new:
                    writing.append([place for _, place in offered.new])
            case 2:
                if places := held.lookup(keys(name, length)):
                    used.append(places)
            case 3 | 4:
                if used:
                    held.release(used.pop(draw.randrange(len(used))))
            case 5:
                if writing:
                    held.finish(writing.pop(draw.randrange(len(writing))), ok=draw.random() < 0.8)
            case 6:
                if draw.random() < 0.02:
                    held.reset()
                elif draw.random() < 0.1:
                    held.drop([draw.randrange(held.capacity)])
        names = [held.key_at(place) for place in range(held.capacity)]
        there = [name for name in names if name is not None]
        assert len(there) == len(set(there)) == len(held)
        for places in used:
            assert len(set(places)) == len(places)
    for places in used:
        held.release(places)
    for places in writing:
        held.finish(places, ok=True)
    assert (held.in_use, held.pending, held.detached) == (0, 0, 0)
    assert held.free + len(held) == held.capacity
    assert store(held, keys("z", 24)).kept == 24, "all that is there can go"
