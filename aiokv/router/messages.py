"""What router and instances say to each other over the control channel: one MessagePack array a frame.

Nothing here needs a session. A ``Report`` says all there is to know of an instance, so that a lost one is
made good by the next, and a router that was restarted knows everybody again after one interval. An ``Abort``
is said again after the next report until it is answered.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from aiokv.errors import RemoteProtocolError

__all__ = [
    "ROLES",
    "VERSION",
    "Abort",
    "Aborted",
    "Bye",
    "FromInstance",
    "FromRouter",
    "Heard",
    "Load",
    "Report",
    "Role",
    "decode_from_instance",
    "decode_from_router",
    "encode",
]

#: Of these messages.
VERSION = 1

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

_Life = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Address = Annotated[str, Meta(max_length=256)]
_Short = Annotated[str, Meta(max_length=128)]
_Text = Annotated[str, Meta(max_length=2048)]
_Count = Annotated[int, Meta(ge=0, lt=2**48)]
_Small = Annotated[int, Meta(ge=0, lt=2**16)]
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Interval = Annotated[float, Meta(ge=0.05, le=60)]


class Load(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False):
    """What an instance has to do.

    Attributes:
        running: Requests that are computed.
        waiting: Requests that wait for their turn.
        blocks_free: Free blocks of its KV cache.
        blocks: All of its blocks.
        bytes_moved: KV bytes that it sent and received since it was started.
        loop_lag: How late its event loop was lately, at worst (seconds).
        wakeup_lag: How late its completion timer was lately, at worst (seconds).
    """

    running: _Count = 0
    waiting: _Count = 0
    blocks_free: _Count = 0
    blocks: _Count = 0
    bytes_moved: _Count = 0
    loop_lag: _Seconds = 0.0
    wakeup_lag: _Seconds = 0.0


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of the messages."""


class Report(_Message, frozen=True, tag=1, kw_only=True):
    """An instance is here, what it is, and what it has to do; its heartbeat."""

    version: _Small = VERSION
    #: A new one each time that the process is started.
    incarnation: _Life
    #: Counts this incarnation's reports.
    number: _Count
    role: Role
    #: Where its control channel is reached, and where its HTTP server is.
    address: _Address
    http: _Address
    #: Where its transfer engines are, one for each rank.
    engines: Annotated[tuple[_Address, ...], Meta(max_length=256)]
    #: Names of the model that it serves, and what its KV must have in common with that of its peers.
    models: Annotated[tuple[_Short, ...], Meta(min_length=1, max_length=64)]
    fingerprint: _Short
    #: Tokens of prompt and answer, at most; 0: not known.
    context: _Count
    #: Seconds between its reports.
    interval: _Interval
    #: It takes nothing new and finishes what it has.
    draining: bool
    #: What the router has to show it with each request.
    token: Annotated[str, Meta(max_length=512)]
    #: Path that answers 200 there, for servers that can't show who they are; empty: it does show it.
    probe: _Short
    load: Load


class Bye(_Message, frozen=True, tag=2):
    """An instance ends, now."""

    incarnation: _Life


class Aborted(_Message, frozen=True, tag=3):
    """An instance has given a request up, or has none of that name."""

    incarnation: _Life
    transfer: _Id
    attempt: _Small


class Heard(_Message, frozen=True, tag=4):
    """The router's answer to a report."""

    router: _Life
    incarnation: _Life
    number: _Count
    #: ``joining`` while it is not known yet whether it is at its HTTP address.
    state: Literal["joining", "up", "refused"]
    why: _Text = ""


class Abort(_Message, frozen=True, tag=5):
    """Nobody wants a request any more."""

    incarnation: _Life
    transfer: _Id
    attempt: _Small
    why: _Text = ""


FromInstance = Report | Bye | Aborted
FromRouter = Heard | Abort

_ENCODER = msgspec.msgpack.Encoder()
_OF_INSTANCES: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance)
_OF_ROUTERS: msgspec.msgpack.Decoder[FromRouter] = msgspec.msgpack.Decoder(FromRouter)
#: What decoding raises; RecursionError where somebody nested arrays for the sake of it.
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)

Message = TypeVar("Message")


def encode(message: FromInstance | FromRouter) -> bytes:
    """The message as a frame."""
    return _ENCODER.encode(message)


def decode_from_instance(frame: bytes) -> FromInstance:
    """What an instance says.

    Raises:
        RemoteProtocolError: It is no such message.
    """
    return _decoded(_OF_INSTANCES, frame)


def decode_from_router(frame: bytes) -> FromRouter:
    """What a router says.

    Raises:
        RemoteProtocolError: It is no such message.
    """
    return _decoded(_OF_ROUTERS, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    try:
        return decoder.decode(frame)
    except _MALFORMED as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error
