"""What callers pass: checked, and put into the form that the layers below use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aiokv.engine.arguments import (
    block_lists,
    checked_addresses,
    checked_id,
    checked_trace,
    room_of,
    seconds,
    whole,
)
from aiokv.errors import CapacityError, InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.testing.pairs import LAYOUT

GROUP = LAYOUT.groups[0]


def grouped(*changes: dict[str, object]) -> CacheLayout:
    """A layout with one group of one layer for each of ``changes``."""
    groups = [msgspec.structs.replace(GROUP, layers=(n,), **each) for n, each in enumerate(changes)]
    return CacheLayout(tuple(groups))


TWO = grouped({"block_size": 4}, {"block_size": 16})


# -- block lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [
        [3, 1],
        (3, 1),
        np.array([3, 1], dtype=np.int32),
        np.array([3, 1], dtype=np.uint8),
        [np.int64(3), np.int16(1)],
        [[3, 1]],
        ([3, 1],),
        np.array([[3, 1]]),
    ],
)
def test_one_group_takes_a_list_or_a_list_of_one(blocks: object) -> None:
    (listed,) = block_lists(blocks, LAYOUT)
    assert listed.start == 0
    assert listed.ids.dtype == np.int64
    assert listed.ids.tolist() == [3, 1]


def test_ids_are_copied_so_that_the_caller_may_go_on_with_its_own() -> None:
    mine = np.array([3, 1])
    (listed,) = block_lists(mine, LAYOUT)
    mine[:] = 9
    assert listed.ids.tolist() == [3, 1]


def test_tensors_are_lists_of_ids_too() -> None:
    torch = pytest.importorskip("torch")
    for blocks in (torch.tensor([3, 1]), torch.tensor([[3, 1]]), [torch.tensor([3, 1])]):
        assert block_lists(blocks, LAYOUT)[0].ids.tolist() == [3, 1]


@pytest.mark.parametrize("blocks", [[], [[]], range(0)])
def test_a_list_may_be_empty(blocks: object) -> None:
    (listed,) = block_lists(blocks, LAYOUT)
    assert listed.ids.size == 0


def test_each_group_has_its_own_list() -> None:
    first, second = block_lists([[3, 1], [7]], TWO)
    assert (first.ids.tolist(), second.ids.tolist()) == ([3, 1], [7])


@pytest.mark.parametrize(
    ("blocks", "layout", "message"),
    [
        ([[1], [2]], LAYOUT, "block lists for 2 groups, the cache has 1"),
        ([[1]], TWO, "block lists for 1 groups, the cache has 2"),
        ([], TWO, "block lists for 0 groups, the cache has 2"),
        # As many ids as there are groups are not a list for each of them.
        ([1, 2], TWO, "come as a list for each group, not as 1"),
        ([[1], 2], TWO, "come as a list for each group, not as 2"),
        ([[[1, 2]]], LAYOUT, "come as a list for each group"),
        ([1.0, 2.0], LAYOUT, "block ids are integers, not float64"),
        ([[1.5]], LAYOUT, "block ids are integers, not float64"),
        ([[True]], LAYOUT, "block ids are integers, not bool"),
        ([["1"]], LAYOUT, "block ids are integers"),
        ([[2**70]], LAYOUT, "block ids are integers, not object"),
        ([[None]], LAYOUT, "block ids are integers"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(blocks: object, layout: CacheLayout, message: str) -> None:
    with pytest.raises(InvalidBlocks, match=message):
        block_lists(blocks, layout)


def test_more_blocks_than_a_message_holds_are_refused() -> None:
    assert block_lists(range(200_000), LAYOUT)[0].ids.size == 200_000
    with pytest.raises(CapacityError, match="at most 200000 blocks"):
        block_lists(range(200_001), LAYOUT)
    with pytest.raises(CapacityError):
        block_lists([range(100_000), range(100_001)], TWO)


# -- room -------------------------------------------------------------------------------------------


def test_the_group_with_the_least_room_decides() -> None:
    assert room_of(block_lists([[0, 1, 2, 3], [0]], TWO), TWO) == 16
    assert room_of(block_lists([[0, 1], [0, 1]], TWO), TWO) == 8


def test_state_takes_no_room() -> None:
    mixed = grouped({"block_size": 4}, {"block_size": 1, "kind": "state"})
    assert room_of(block_lists([[0, 1], [0]], mixed), mixed) == 8


def test_state_alone_has_room_for_whatever_led_to_it() -> None:
    state = grouped({"kind": "state"})
    assert room_of(block_lists([0], state), state) == 1


# -- the rest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tid", ["a", "x" * 256, "Überweisung/7", "\N{DROMEDARY CAMEL}" * 256])
def test_an_id_is_what_it_is(tid: str) -> None:
    assert checked_id(tid) == tid


@pytest.mark.parametrize("tid", ["", "x" * 257, b"bytes", 7, None, "half \ud83d of a pair"])
def test_what_can_be_no_id_is_refused(tid: object) -> None:
    with pytest.raises(ValueError, match="a transfer id is a string of 1 to 256 characters"):
        checked_id(tid)


@pytest.mark.parametrize("trace", ["x" * 65, None, b"", "\udc00"])
def test_what_can_be_no_trace_context_is_refused(trace: object) -> None:
    assert checked_trace("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    with pytest.raises(ValueError, match="a trace context is a string of at most 64 characters"):
        checked_trace(trace)


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (2**48 - 1, 2**48 - 1), (np.int64(5), 5)])
def test_whole_numbers_become_pythons_own(given: object, expected: int) -> None:
    found = whole(given, "tokens")
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize("given", [-1, 2**48, 1.0, "1", None])
def test_what_no_message_can_carry_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="^tokens is an integer of at least 0 and less than"):
        whole(given, "tokens")


def test_a_number_may_have_to_be_larger() -> None:
    with pytest.raises(ValueError, match="^parts is an integer of at least 1"):
        whole(0, "parts", 1)


def test_addresses_are_a_list_with_each_once() -> None:
    assert checked_addresses(("tcp://a:1", "tcp://b:1"), "to") == ["tcp://a:1", "tcp://b:1"]
    assert checked_addresses((), "to") == []
    with pytest.raises(ValueError, match="^to must name each engine once"):
        checked_addresses(["tcp://a:1", "tcp://a:1"], "to")
    with pytest.raises(ValueError, match="^sources is a list of addresses, not the one address 'tcp://a:1'"):
        checked_addresses("tcp://a:1", "sources")


@pytest.mark.parametrize(("deadline", "expected"), [(1, 10**9), (0.25, 250_000_000), (1e-9, 1)])
def test_a_deadline_is_in_seconds(deadline: float, expected: int) -> None:
    assert seconds(deadline) == expected


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), 86_400])
def test_a_deadline_that_cannot_be_meant_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match="between 0 s and a day"):
        seconds(deadline)
