"""Frames in a byte stream, however it is cut."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.control.base import MAX_FRAME
from aiokv.control.wire import GREETING, greeted, pack, take
from aiokv.errors import RemoteProtocolError


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(min_value=1, max_value=30)))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(frames, pieces):
    stream = GREETING + b"".join(map(pack, frames))
    arrived, got, known = bytearray(), [], False
    cuts = iter([*pieces, *[1] * len(stream)])
    while stream:
        size = next(cuts)
        arrived += stream[:size]
        stream = stream[size:]
        known = known or greeted(arrived)
        while known and (frame := take(arrived)) is not None:
            got.append(frame)
    assert known
    assert got == frames
    assert not arrived


@pytest.mark.parametrize("size", [MAX_FRAME + 1, 1 << 31, (1 << 32) - 1])
def test_too_large_a_frame_is_refused_by_its_length_alone(size):
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError, match=str(size)):
        take(bytearray(size.to_bytes(4, "big")))
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


def test_the_largest_frame():
    arrived = bytearray(pack(bytes(MAX_FRAME)))
    assert take(arrived) == bytes(MAX_FRAME)


@given(st.binary(min_size=1, max_size=len(GREETING)))
def test_what_is_no_greeting_is_refused_as_soon_as_that_shows(data):
    arrived = bytearray(data)
    if GREETING.startswith(data):
        assert greeted(arrived) is (data == GREETING)
    else:
        with pytest.raises(RemoteProtocolError):
            greeted(arrived)
