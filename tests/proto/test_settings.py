"""Settings: timers and bounds that can be meant."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from aiokv.proto.settings import SECOND, Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heartbeat_ns": SECOND}, r"heartbeat_ns \* 2 <= lease_ns < drain_ns, not 1000000000 \* 2 <= 15"),
        ({"lease_ns": 2 * SECOND}, "lease_ns < drain_ns, not .* 2000000000 < 2000000000"),
        ({"drain_ns": SECOND}, "lease_ns < drain_ns"),
        ({"liveness_ns": SECOND}, "liveness_ns=1000000000 is less than three heartbeats of 500000000"),
    ],
)
def test_timers_that_contradict_each_other_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
@pytest.mark.parametrize("given", [1.5, 2e9, float("nan"), "1", None])
def test_what_is_no_integer_is_refused(name: str, given: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is an integer, not {given!r}$"):
        Settings(**{name: given})


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
@pytest.mark.parametrize("given", [-1, 2**62])
def test_what_is_out_of_range_is_refused(name: str, given: int) -> None:
    with pytest.raises(
        ValueError, match=f"^{name} is an integer of at least [01], less than .* not {given}$"
    ):
        Settings(**{name: given})


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
def test_some_can_be_done_without(name: str) -> None:
    if name in ("close_ns", "tombstone_ns", "tombstones"):
        assert getattr(Settings(**{name: 0}), name) == 0
    else:
        with pytest.raises(ValueError, match=f"^{name} is an integer of at least 1, .* not 0$"):
            Settings(**{name: 0})


def test_integers_become_pythons_own() -> None:
    settings = Settings(peers=np.int32(7))  # type: ignore[arg-type]
    assert type(settings.peers) is int
    assert settings == Settings(peers=7)


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
def test_each_is_documented(name: str) -> None:
    assert f"\n    {name}: " in inspect.cleandoc(Settings.__doc__ or "")  # Python 3.13 does it by itself
