"""Fuzzing: a few thousand cases for everybody, and that faults which a decoder might have are found."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from aiokv.errors import RemoteProtocolError
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks
from aiokv.testing.fuzz import decoder
from aiokv.testing.fuzz.recording import genuine_frames


def test_nothing_but_the_documented_errors_comes_of_decoding(seed: int) -> None:
    counts = decoder.fuzz(1700, seed)
    assert counts.total() == 1700
    # The cases get to where there is something to get wrong.
    assert {"no frames", "frames with malformed messages", "block lists refused", "plans made"} <= set(counts)


def test_a_seed_gives_the_same_cases() -> None:
    assert decoder.fuzz(200, 5) == decoder.fuzz(200, 5)
    assert genuine_frames() == genuine_frames()


def test_lists_that_are_not_checked_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(packed, layout):
        return tuple(
            GroupBlocks(start, np.frombuffer(data, "<u4").astype(np.int64)) for start, data in packed
        )

    monkeypatch.setattr(decoder, "unpack_blocks", careless)
    with pytest.raises(AssertionError, match="of seed 3: ValueError"):
        decoder.fuzz(5000, 3)


def test_placements_that_are_not_checked_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "check", lambda self, layout: None)
    with pytest.raises(AssertionError, match="of seed 3"):
        decoder.fuzz(20_000, 3)


def test_memory_out_of_proportion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(packed, layout):
        bytearray(1 << 24)
        raise RemoteProtocolError("refused, but late")

    monkeypatch.setattr(decoder, "unpack_blocks", greedy)
    with pytest.raises(AssertionError, match="bytes of memory"):
        decoder.fuzz(1000, 3)


def test_the_program_runs_and_says_what_it_did() -> None:
    command = [
        sys.executable,
        "-m",
        "aiokv.testing.fuzz",
        "--what",
        "decoder",
        "--cases",
        "100",
        "--seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.startswith("decoder: 100 cases by seed 1\ndecoder: ")
