"""Fields: what callers bring becomes what a message can carry, or is refused by its name."""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import pytest
import torch

from aiokv.proto.fields import flag, integer, integers, octets, settle, text


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7), torch.tensor(7), enum.IntEnum("E", "a")(1)])
def test_integers_become_pythons_own(value: object) -> None:
    found = integer(value, "x")
    assert (type(found), found) == (int, 7 if value != 1 else 1)


@pytest.mark.parametrize(
    "value", [True, np.True_, 7.0, np.float64(7), "7", b"7", None, [7], torch.tensor(7.0)]
)
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="x must be an integer, not "):
        integer(value, "x")


def test_series_of_integers() -> None:
    assert integers(np.array([1, 2]), "x") == (1, 2)
    assert integers(range(3), "x", 3) == (0, 1, 2)
    with pytest.raises(ValueError, match=r"x must be 2 integers, got \(0, 1, 2\)"):
        integers(range(3), "x", 2)
    for bad in ("12", b"12", 7, None):
        with pytest.raises(TypeError, match="x must be a tuple of integers, not "):
            integers(bad, "x")
    with pytest.raises(TypeError, match="x must be an integer, not float 2.5"):
        integers([1, 2.5], "x")


def test_strings_become_pythons_own() -> None:
    for value in (np.str_("btd"), enum.StrEnum("E", {"a": "btd"})("btd"), "btd"):
        found = text(value, "x")
        assert (type(found), found) == (str, "btd")
    with pytest.raises(TypeError, match="x must be a str, not dtype torch.bfloat16"):
        text(torch.bfloat16, "x")
    with pytest.raises(ValueError, match="x has no form in UTF-8"):
        text("\ud800", "x")


def test_bytes_become_pythons_own() -> None:
    assert type(octets(np.bytes_(b"m"), "x")) is bytes
    for bad in ("m", bytearray(b"m"), None, 3):
        with pytest.raises(TypeError, match="x must be bytes, not "):
            octets(bad, "x")


def test_flags() -> None:
    assert flag(value=True, name="x")
    for bad in (1, np.True_, None):
        with pytest.raises(TypeError, match="x must be True or False"):
            flag(bad, "x")


def test_checked_fields_are_put_into_a_frozen_struct() -> None:
    class Frozen(msgspec.Struct, frozen=True):
        a: int

    made = Frozen(1)
    settle(made, a=2)
    assert made == Frozen(2)
