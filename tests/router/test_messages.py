"""What goes over the control channel."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import RemoteProtocolError
from aiokv.router.messages import (
    Abort,
    Aborted,
    Bye,
    Heard,
    decode_from_instance,
    decode_from_router,
    encode,
)

WHO = b"w" * 16


@pytest.mark.parametrize("message", [Bye(WHO), Aborted(WHO, "id", 1)])
def test_instances_are_understood(message: Bye | Aborted) -> None:
    assert decode_from_instance(encode(message)) == message
    with pytest.raises(RemoteProtocolError):
        decode_from_router(encode(message))


@pytest.mark.parametrize("message", [Heard(b"r" * 16, WHO, 7, "refused", "why"), Abort(WHO, "id", 1, "why")])
def test_routers_are_understood(message: Heard | Abort) -> None:
    assert decode_from_router(encode(message)) == message
    with pytest.raises(RemoteProtocolError):
        decode_from_instance(encode(message))


@given(st.binary(max_size=200))
def test_nonsense_is_refused_with_one_kind_of_error(data: bytes) -> None:
    for decode in (decode_from_instance, decode_from_router):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@pytest.mark.parametrize(
    "message",
    [
        Bye(b"short"),
        Aborted(WHO, "", 1),
        Aborted(WHO, "x" * 257, 1),
        Aborted(WHO, "id", -1),
        Aborted(WHO, "id", 1 << 20),
    ],
)
def test_fields_are_bounded(message: Bye | Aborted) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_from_instance(msgspec.msgpack.encode(message))


def test_nesting_is_no_attack() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_from_instance(b"\x91" * 100_000)
