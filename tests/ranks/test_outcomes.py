from __future__ import annotations

import asyncio

import pytest
import torch

from aiokv.errors import (
    CapacityError,
    DeadlineExceeded,
    DeviceError,
    InvalidBlocks,
    LayoutMismatch,
    PeerLostError,
    Refused,
)
from aiokv.ranks.outcomes import Failed, Hit, Miss, Severity
from aiokv.ranks.units import Blocks, Tokens

KINDS = [
    (asyncio.CancelledError(), Severity.CANCELLED),
    (TimeoutError(), Severity.TIMEOUT),
    (DeadlineExceeded(), Severity.TIMEOUT),
    (PeerLostError(), Severity.LOST),
    (ConnectionResetError(), Severity.LOST),
    (Refused(), Severity.REFUSED),
    (LayoutMismatch(), Severity.REFUSED),
    (CapacityError(), Severity.CAPACITY),
    (MemoryError(), Severity.CAPACITY),
    (torch.OutOfMemoryError(), Severity.CAPACITY),
    (InvalidBlocks(), Severity.INVALID),
    (TypeError(), Severity.INVALID),
    (DeviceError(), Severity.FAULT),
    (ZeroDivisionError(), Severity.FAULT),
    (KeyboardInterrupt(), Severity.FAULT),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda value: type(value).__name__)
def test_each_error_has_its_kind(error: BaseException, kind: Severity) -> None:
    assert Severity.of(error) is kind


def test_every_kind_is_some_errors() -> None:
    assert {kind for _, kind in KINDS} == set(Severity)
    assert min(Severity) is Severity.CANCELLED
    assert max(Severity) is Severity.FAULT


def test_an_error_is_not_nothing() -> None:
    assert len({Miss(), Miss(), Failed(Severity.TIMEOUT), Failed(Severity.CAPACITY), Hit(Blocks(0))}) == 4
    assert Hit(Blocks(4)) != Hit(Tokens(4))


def test_a_severity_is_one_of_those_there_are() -> None:
    assert Failed(2).severity is Severity.TIMEOUT  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="99"):
        Failed(99)  # type: ignore[arg-type]
