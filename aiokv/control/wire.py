"""How frames go over a byte stream: a greeting of 8 bytes each way, then 4 bytes of length before each frame.

Frames go only from who connected to who accepted. The one that connects greets first; the one that accepts
answers once it knows that its peer may come in, and nothing is sent before that answer is there.
"""

from __future__ import annotations

from aiokv.control.base import MAX_FRAME
from aiokv.errors import RemoteProtocolError

__all__ = ["GREETING", "greeted", "pack", "spoken", "take"]

#: Tells apart who speaks this protocol, in this version, from whoever else connects.
GREETING = b"aiokv/1\n"

_HEAD = 4


def pack(frame: bytes) -> bytes:
    """The frame as it goes over the wire."""
    return len(frame).to_bytes(_HEAD, "big") + frame


def greeted(data: bytearray) -> bool:
    """Take the greeting off the front of what has arrived; False while not all of it is there.

    Raises:
        RemoteProtocolError: This is something else.
    """
    if not GREETING.startswith(data[: len(GREETING)]):
        raise RemoteProtocolError(f"what is there speaks {spoken(data)}")
    if len(data) < len(GREETING):
        return False
    del data[: len(GREETING)]
    return True


def spoken(data: bytes | bytearray) -> str:
    """What somebody speaks who begins like this, in words."""
    if GREETING.startswith(data[: len(GREETING)]):
        return "aiokv's protocol without TLS (stream://)"
    if data[:1] == b"\xff":
        return "ZeroMQ (tcp://)"
    if 0x14 <= data[0] <= 0x17 and data[1:2] in (b"", b"\x03"):  # a record's type, and its version
        return "TLS (tls://)"
    return "something else"


def take(data: bytearray) -> bytes | None:
    """Take a frame off the front of what has arrived; None while not all of it is there.

    Raises:
        RemoteProtocolError: It would be larger than ``MAX_FRAME``. Nothing was allocated for it.
    """
    if len(data) < _HEAD:
        return None
    size = int.from_bytes(data[:_HEAD], "big")
    if size > MAX_FRAME:
        raise RemoteProtocolError(f"a frame of {size} bytes; {MAX_FRAME} is the most")
    if len(data) < _HEAD + size:
        return None
    with memoryview(data) as view:
        frame = bytes(view[_HEAD : _HEAD + size])
    del data[: _HEAD + size]
    return frame
