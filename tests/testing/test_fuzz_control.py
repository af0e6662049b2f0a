"""Fuzzing of the control port: some cases for everybody, and that faults of engines are found."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.engine import demultiplexer, peer
from aiokv.proto.messages import Frame
from aiokv.testing.fuzz import control


def test_a_good_peer_goes_on_beside_any_nonsense(seed: int) -> None:
    counts = control.fuzz(280, seed)
    assert counts["good transfers"] >= 280 // 40
    assert counts["stray frames"] > 0


def test_peers_that_are_driven_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_worth", lambda sessions: 0)
    with pytest.raises(AssertionError, match="seed 1: a good peer was disturbed: .*closed"):
        control.fuzz(5000, 1)


def test_ports_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.Peers, "_drop_idle", lambda self: None)
    with pytest.raises(AssertionError, match="there are .* (sessions|ports)"):
        control.fuzz(10_000, 1)


def test_errors_that_nobody_sees_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demultiplexer, "decode_frame", msgspec.msgpack.Decoder(Frame).decode)
    with pytest.raises(AssertionError, match="seed 1: .* errors came to the loop's handler"):
        control.fuzz(200, 1)
