"""What callers pass: checked, and put into the form that the layers below use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aiokv.device.host import HostDevice
from aiokv.device.mocked import MockedDevice
from aiokv.engine.arguments import (
    block_lists,
    checked_addresses,
    checked_id,
    checked_priority,
    checked_stream,
    checked_trace,
    layer_index,
    room_of,
    seconds,
    wanted_tokens,
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
        ([[1], [2]], LAYOUT, "blocks has lists for 2 groups, the cache has 1"),
        ([[1]], TWO, "blocks has lists for 1 groups, the cache has 2"),
        ([], TWO, "blocks has lists for 0 groups, the cache has 2"),
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


@pytest.mark.parametrize(
    "blocks", [None, {1, 2}, iter([1, 2]), {0: 1}, 5, "12", b"12", bytearray(2), np.array(3), range]
)
def test_what_is_no_list_is_refused(blocks: object) -> None:
    with pytest.raises(TypeError, match="^blocks is a list of block ids, .* not "):
        block_lists(blocks, LAYOUT)


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


@pytest.mark.parametrize("tid", ["", "x" * 257, "half \ud83d of a pair"])
def test_what_can_be_no_id_is_refused(tid: str) -> None:
    with pytest.raises(ValueError, match="^tid, the transfer id, is a string of 1 to 256 characters, not "):
        checked_id(tid)


@pytest.mark.parametrize("tid", [b"bytes", 7, None, ["t"]])
def test_what_is_no_string_is_no_id(tid: object) -> None:
    with pytest.raises(TypeError, match="^tid, the transfer id, is a string, not "):
        checked_id(tid)


def test_a_message_shows_the_beginning_of_what_is_far_too_long() -> None:
    with pytest.raises(ValueError, match="^tid, .* not 'x{40}' and 999960 characters more$"):
        checked_id("x" * 1_000_000)


@pytest.mark.parametrize("trace", ["x" * 65, "\udc00"])
def test_what_can_be_no_trace_context_is_refused(trace: str) -> None:
    assert checked_trace("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    with pytest.raises(ValueError, match="^trace, a trace context, is a string of at most 64 characters"):
        checked_trace(trace)


@pytest.mark.parametrize("trace", [None, b""])
def test_what_is_no_string_is_no_trace_context(trace: object) -> None:
    with pytest.raises(TypeError, match="^trace, a trace context, is a string, not "):
        checked_trace(trace)


@pytest.mark.parametrize(("given", "expected"), [(0, 0), (2**48 - 1, 2**48 - 1), (np.int64(5), 5)])
def test_whole_numbers_become_pythons_own(given: object, expected: int) -> None:
    found = whole(given, "tokens")
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize("given", [-1, 2**48])
def test_what_no_message_can_carry_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match="^tokens is an integer of at least 0 and less than .* not "):
        whole(given, "tokens")


@pytest.mark.parametrize("given", [1.0, float("nan"), "1", None, [1]])
def test_what_is_no_integer_is_refused(given: object) -> None:
    for checked in (lambda: whole(given, "tokens"), lambda: wanted_tokens(0, given or "", 4)):
        with pytest.raises(TypeError, match="^tokens is an integer, not "):
            checked()
    with pytest.raises(TypeError, match="^priority is an integer, not "):
        checked_priority(given)
    with pytest.raises(TypeError, match="^layer is an integer, not "):
        layer_index(given, 4)


def test_a_priority_is_any_integer_of_32_bits() -> None:
    assert [checked_priority(given) for given in (-(2**31), np.int8(-3), 2**31 - 1)] == [
        -(2**31),
        -3,
        2**31 - 1,
    ]
    for given in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="^priority is an integer from .* not "):
            checked_priority(given)


def test_a_layer_is_one_of_the_models() -> None:
    assert type(layer_index(np.int64(70), 80)) is int  # 1 << np.int64(70) is 0
    for given in (-1, 4):
        with pytest.raises(IndexError, match=rf"^layer {given} is not one of 0\.\.3$"):
            layer_index(given, 4)


def test_the_tokens_that_are_wanted_have_room() -> None:
    assert wanted_tokens(0, None, 8) == (0, -1)
    assert wanted_tokens(8, 8, 8) == (8, 8)
    assert wanted_tokens(0, 0, 0) == (0, 0)
    for given, message in (
        ((0, 9, 8), "^tokens=9, but the blocks have room for 8$"),
        ((5, 4, 8), "^first_token=5 lies beyond tokens=4$"),
        ((9, None, 8), "^first_token=9 lies beyond the 8 tokens that the blocks have room for$"),
        ((0, None, 0), "^blocks is empty: there is no room for what is offered$"),
    ):
        with pytest.raises(InvalidBlocks, match=message):
            wanted_tokens(*given)


@pytest.mark.parametrize("given", [None, HostDevice().stream(), MockedDevice().stream()])
def test_a_stream_may_be_any_devices(given: object) -> None:
    assert checked_stream(given) is given


@pytest.mark.parametrize("given", [object(), 7, "stream", 0])
def test_what_is_no_stream_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="^stream is what has __cuda_stream__, or None, not "):
        checked_stream(given)


def test_a_number_may_have_to_be_larger() -> None:
    with pytest.raises(ValueError, match="^parts is an integer of at least 1"):
        whole(0, "parts", 1)


def test_addresses_are_a_list_with_each_once() -> None:
    assert checked_addresses(("tcp://a:1", "tcp://b:1"), "to") == ["tcp://a:1", "tcp://b:1"]
    assert checked_addresses((), "to") == []
    with pytest.raises(ValueError, match="^to must name each engine once"):
        checked_addresses(["tcp://a:1", "tcp://a:1"], "to")
    assert sorted(checked_addresses({"tcp://a:1": 1, "tcp://b:1": 2}.keys(), "to")) == [
        "tcp://a:1",
        "tcp://b:1",
    ]
    with pytest.raises(TypeError, match="^sources is a list of addresses, not the one address 'tcp://a:1'"):
        checked_addresses("tcp://a:1", "sources")


@pytest.mark.parametrize("given", [None, 5, iter(["tcp://a:1"]), b"tcp://a:1", {"tcp://a:1": 1}])
def test_what_is_no_list_of_addresses_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="^to is a list of addresses, not "):
        checked_addresses(given, "to")


@pytest.mark.parametrize("given", [[None], ["tcp://a:1", 5], [b"tcp://a:1"], [["tcp://a:1"]]])
def test_an_address_is_a_string(given: object) -> None:
    with pytest.raises(TypeError, match="^to lists control addresses, which are strings, not "):
        checked_addresses(given, "to")


@pytest.mark.parametrize(
    ("deadline", "expected"),
    [(1, 10**9), (0.25, 250_000_000), (1e-9, 1), (1e-12, 1), (np.float32(2), 2 * 10**9)],
)
def test_a_deadline_is_in_seconds(deadline: float, expected: int) -> None:
    assert seconds(deadline) == expected


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), 86_400])
def test_a_deadline_that_cannot_be_meant_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match="^deadline lies between 0 s and a day, not at "):
        seconds(deadline)


@pytest.mark.parametrize("deadline", [None, "3", [3], 3j])
def test_what_is_no_number_is_no_deadline(deadline: object) -> None:
    with pytest.raises(TypeError, match="^deadline is a number of seconds, not "):
        seconds(deadline)
