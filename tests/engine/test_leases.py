"""Which blocks are in use: counted, taken whole or not at all, given back once."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiokv.engine.leases import BlockLeases, Lease
from aiokv.errors import BusyError, InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import GroupBlocks
from aiokv.testing.pairs import LAYOUT

GROUP = LAYOUT.groups[0]
TWO = CacheLayout(tuple(msgspec.structs.replace(GROUP, layers=(n,), blocks=(8, 4)[n]) for n in range(2)))


def blocks(*groups: list[int]) -> list[GroupBlocks]:
    return [GroupBlocks(0, np.array(ids, dtype=np.int64)) for ids in groups]


@pytest.fixture
def leases() -> BlockLeases:
    return BlockLeases(TWO)


def test_what_is_taken_is_held_until_it_is_given_back(leases: BlockLeases) -> None:
    lease = leases.take(blocks([0, 7], [3]), write=True)
    assert (leases.out, leases.held()) == (1, 3)
    lease.give_back()
    assert (leases.out, leases.held()) == (0, 0)


def test_giving_back_twice_takes_nothing_from_others(leases: BlockLeases) -> None:
    first = leases.take(blocks([1], []), write=False)
    second = leases.take(blocks([1], []), write=False)
    first.give_back()
    first.give_back()
    assert (leases.out, leases.held()) == (1, 1)
    with pytest.raises(BusyError):
        leases.take(blocks([1], []), write=True)
    second.give_back()
    leases.take(blocks([1], []), write=True)


def test_blocks_are_read_by_many_and_written_by_one(leases: BlockLeases) -> None:
    readers = [leases.take(blocks([1, 2], []), write=False) for _ in range(3)]
    with pytest.raises(BusyError, match="^group 0: block 2 is being read by another transfer"):
        leases.take(blocks([3, 2], []), write=True)
    for reader in readers:
        reader.give_back()
    leases.take(blocks([3, 2], []), write=True)
    for write in (True, False):
        with pytest.raises(BusyError, match="^group 0: block 3 is being written by another transfer"):
            leases.take(blocks([1, 3], []), write=write)


@pytest.mark.parametrize(
    ("listed", "error", "message"),
    [
        (blocks([8], []), InvalidBlocks, "group 0: there is no block 8, the cache has 0..7"),
        (blocks([], [4]), InvalidBlocks, "group 1: there is no block 4, the cache has 0..3"),
        (blocks([-1], []), InvalidBlocks, "group 0: there is no block -1"),
        (blocks([-(2**63)], []), InvalidBlocks, "there is no block -9223372036854775808"),
        (blocks([1, 2, 1], []), InvalidBlocks, "group 0: block 1 stands twice in one list"),
        (blocks([0], [2, 2]), InvalidBlocks, "group 1: block 2 stands twice in one list"),
        (blocks([0], [0]), BusyError, "group 1: block 0 is being written"),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_a_refused_list_takes_nothing(
    leases: BlockLeases, listed: list[GroupBlocks], error: type[Exception], message: str, write: bool
) -> None:
    leases.take(blocks([], [0]), write=True)
    with pytest.raises(error, match=message):
        leases.take(listed, write=write)
    assert (leases.out, leases.held()) == (1, 1)


def test_the_same_id_in_two_groups_is_two_blocks(leases: BlockLeases) -> None:
    leases.take(blocks([1], [1]), write=True)
    assert leases.held() == 2


def test_nothing_can_be_taken(leases: BlockLeases) -> None:
    leases.take(blocks([], []), write=True).give_back()
    assert leases.out == 0


class AnyLeases(RuleBasedStateMachine):
    """Whatever is taken and given back, the counts are those of a plain list of who holds what."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.leases = BlockLeases(TWO)
        self.model: dict[Lease, tuple[set[int], bool]] = {}

    @rule(target=held, ids=st.sets(st.integers(0, 7)), write=st.booleans())
    def take(self, ids: set[int], write: bool) -> Lease | None:
        clash = any(ids & theirs and (write or writes) for theirs, writes in self.model.values())
        try:
            lease = self.leases.take(blocks(sorted(ids), []), write=write)
        except BusyError:
            assert clash
            return None
        assert not clash
        self.model[lease] = ids, write
        return lease

    @rule(lease=consumes(held))
    def give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.give_back()
            del self.model[lease]

    @invariant()
    def counts(self) -> None:
        assert self.leases.out == len(self.model)
        assert self.leases.held() == len(set().union(*(ids for ids, _ in self.model.values())))


TestAnyLeases = AnyLeases.TestCase
