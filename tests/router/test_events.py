"""Streams are cut between events only."""

from __future__ import annotations

import random

import pytest

from aiokv.router.events import Events


def test_half_an_event_is_held_back() -> None:
    events = Events()
    assert events.feed(b'data: {"a"') == b""
    assert events.feed(b": 1}\n\ndata: 2") == b'data: {"a": 1}\n\n'
    assert events.feed(b"\n\n") == b"data: 2\n\n"
    assert events.told and not events.ended


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_nothing_is_lost_however_it_is_cut(seed: int, end: str) -> None:
    draw = random.Random(seed)
    whole = "".join(f"data: {number}{end}{end}" for number in range(50)).encode() + b"data: [DONE]" + b"\n\n"
    for _ in range(50):
        events, out, at = Events(), b"", 0
        while at < len(whole):
            size = draw.randrange(1, 20)
            piece = events.feed(whole[at : at + size])
            assert not piece or piece.endswith((b"\n\n", b"\r\n\r\n"))
            out, at = out + piece, at + size
        assert out == whole
        assert events.ended and not events.failed


def test_comments_are_no_tokens() -> None:
    events = Events()
    assert events.feed(b": ping\n\n") == b": ping\n\n"
    assert not events.told
    events.feed(b": ping\n\ndata: 1\n\n")
    assert events.told


@pytest.mark.parametrize("said", [b'data: {"error": 1}\n\n', b'data: 1\n\ndata: {"error": 1}\n\n'])
def test_an_error_ends_a_stream(said: bytes) -> None:
    events = Events()
    events.feed(said)
    assert events.ended and events.failed


def test_done_within_a_text_is_no_end() -> None:
    events = Events()
    events.feed(b'data: {"text": "data: [DONE]"}\n\n')
    assert not events.ended


def test_an_event_without_an_end_is_refused() -> None:
    events = Events()
    with pytest.raises(ValueError, match="1048576"):
        for _ in range(20):
            events.feed(b"x" * (1 << 16))
