"""Bounds and times, and addresses, are checked when they are given."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.router.server import Router
from aiokv.router.settings import RouterSettings


@pytest.mark.parametrize("wrong", [{"body": 0}, {"deadline": -1}, {"deadline": float("inf")}, {"queue": -1}])
def test_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RouterSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"body": 1.5}, {"body": True}, {"deadline": "soon"}])
def test_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        RouterSettings(**wrong)


def test_no_queue_is_a_choice() -> None:
    assert RouterSettings(queue=0).queue == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"http": "8000"},
        {"http": "127.0.0.1:99999"},
        {"http": "0.0.0.0:8000"},
        {"http": "0.0.0.0:8000", "page": "0.0.0.0:8001", "api_keys": ["k"]},
        {"control": "tcp://0.0.0.0:7000", "advertise": "tcp://10.0.0.1:7000"},
        {"control": "nowhere"},
    ],
)
def test_addresses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Router(**wrong)
    if wrong.get("http", "").startswith("0") and "page" not in wrong:
        Router(**wrong, api_keys=["k"])


@pytest.mark.parametrize("keys", ["key", [""], [7]])
def test_api_keys(keys: Any) -> None:
    with pytest.raises(TypeError):
        Router(api_keys=keys)
