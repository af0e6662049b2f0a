"""Fuzzing of the data ports: some hundred cases for everybody, and that faults are found."""

from __future__ import annotations

import pytest

from aiokv.proto.plan import CopyPlan
from aiokv.testing.fuzz import data
from aiokv.transports.handshake import Secret


@pytest.mark.asyncio
async def test_nothing_but_the_documented_errors_comes_of_the_data_ports(seed: int) -> None:
    counts = await data.attack(250, seed)
    assert counts.total() == 250
    # The cases get to where there is something to get wrong.
    assert {
        "frames: cut",
        "frames: still there, something landed",
        "tcp handshake: not let in",
        "tcp handshake: let in",
        "tcp handshake: who answered was refused",
        "shm handshake: not let in",
    } <= set(counts)


@pytest.mark.asyncio
async def test_chunks_that_are_not_checked_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyPlan, "check", lambda self, chunk: None)
    with pytest.raises(AssertionError, match="of seed 3"):
        await data.attack(500, 3)


@pytest.mark.asyncio
async def test_proofs_that_prove_nothing_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Secret, "_proof", lambda self, *said: bytes(32))
    with pytest.raises(AssertionError, match="of seed 3"):
        await data.attack(500, 3)
