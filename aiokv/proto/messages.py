"""What goes over the wire between two engines: frames, and the messages in them.

A frame is one ZeroMQ message: a header that says between which lives of which engines it goes
and where in their streams it stands, and a body of messages that were sent in the same turn.
Everything is MessagePack arrays by msgspec; integers tag the messages. The header and ``Hello``
keep their form in every version of the protocol, so that versions can be negotiated.

A part is named by its transfer id and attempt; the session gives the two engines, the type of
the message (or its ``role``) the direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from aiokv.errors import RemoteProtocolError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks

__all__ = [
    "OLDEST_VERSION",
    "VERSION",
    "Abort",
    "Aborted",
    "Accept",
    "Bye",
    "Frame",
    "Grant",
    "Hello",
    "Landed",
    "Message",
    "Offer",
    "Ping",
    "Pong",
    "Ready",
    "Refuse",
    "Renew",
    "Reset",
    "Role",
    "as_text",
    "decode_frame",
    "decode_messages",
    "encode_frame",
    "encode_message",
    "pack_blocks",
    "unpack_blocks",
]

#: Highest and lowest version of the protocol that this side speaks.
VERSION = 2
OLDEST_VERSION = 1

Role = Literal["producer", "consumer"]

#: Characters that a peer is told of a reason, at most.
_MOST_TEXT = 2048

_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
_Short = Annotated[str, Meta(max_length=64)]
_Address = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, lt=2**48)]
_Time = Annotated[int, Meta(ge=0, lt=2**62)]
_Blob = Annotated[bytes, Meta(max_length=4096)]
_Mask = Annotated[bytes, Meta(max_length=1024)]
_Blocks = tuple[tuple[_Count, bytes], ...]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the messages; no cycles are possible, so the collector need not look."""


class Hello(_Message, frozen=True, tag=1):
    """First in each stream: who I am, what my cache holds, how my memory can be reached."""

    #: Lowest and highest protocol version spoken.
    versions: tuple[int, int]
    #: Control address where this engine can be reached.
    address: _Address
    layout: CacheLayout
    placement: Placement
    #: For each transport by name what a consumer needs in order to connect.
    transports: dict[_Short, _Blob]
    #: Control address by which the receiver was called, which may not be what it calls itself.
    called: _Address = ""


class Ping(_Message, frozen=True, tag=2):
    """A sign of life is asked for, and an extension of the lease."""


class Pong(_Message, frozen=True, tag=3):
    """The sign of life. Until ``lease`` (``time.monotonic_ns()``) one-sided reads are safe."""

    lease: _Time


class Bye(_Message, frozen=True, tag=4):
    """This engine closes; nothing follows."""

    text: _Text


class Reset(_Message, frozen=True, tag=5):
    """The stream so numbered, of the receiver, means nothing here. Outside any stream itself."""

    stream: _Count
    reason: _Short
    text: _Text


class Offer(_Message, frozen=True, tag=10):
    """Producer to a named consumer (push): you may fetch this."""

    tid: _Id
    attempt: _Count
    remaining_us: _Time
    trace: _Short = ""


class Grant(_Message, frozen=True, tag=11):
    """Consumer to producer: destination is reserved, move these tokens of these heads to me."""

    tid: _Id
    attempt: _Count
    remaining_us: _Time
    #: Transport and link that the bytes shall take; both empty: nothing is needed, this reader ends.
    link: _Short
    link_id: Annotated[bytes, Meta(max_length=64)]
    #: Tokens before this one are there already.
    first_token: _Count
    #: Tokens asked for, incl. those before ``first_token``; -1: as many as are offered.
    tokens: Annotated[int, Meta(ge=-1, lt=2**48)]
    #: For each group the half-open range of KV heads asked for; empty ranges are legal.
    heads: tuple[tuple[_Count, _Count], ...]
    #: The consumer's blocks, for transports where the producer sends; else empty.
    blocks: _Blocks = ()
    trace: _Short = ""


class Accept(_Message, frozen=True, tag=12):
    """Producer's answer to a grant that it will serve."""

    tid: _Id
    attempt: _Count
    #: Tokens offered.
    tokens: _Count
    #: The producer's blocks.
    blocks: _Blocks
    #: Bitmap of the layers that are ready already.
    ready: _Mask
    #: Until when one-sided reads are safe; 0 where the producer sends.
    lease: _Time
    #: In version 2: what is offered is the beginning of something, the rest of which is offered apart.
    more: bool = False


class Ready(_Message, frozen=True, tag=13):
    """Producer to consumer: the layers of this bitmap (all so far, not the new ones) may be read."""

    tid: _Id
    attempt: _Count
    ready: _Mask


class Landed(_Message, frozen=True, tag=14):
    """Consumer to producer: everything is in place, and this side reads no more."""

    tid: _Id
    attempt: _Count


class Refuse(_Message, frozen=True, tag=15):
    """The answer to a grant (or an offer) that will not be served."""

    tid: _Id
    attempt: _Count
    #: Role of the sender.
    role: Role
    reason: _Short
    text: _Text


class Abort(_Message, frozen=True, tag=16):
    """The sender gives the part up and commits nothing more. Always answered."""

    tid: _Id
    attempt: _Count
    #: Role of the sender.
    role: Role
    reason: _Short
    text: _Text


class Aborted(_Message, frozen=True, tag=17):
    """The sender can touch nothing of this part any more."""

    tid: _Id
    attempt: _Count
    #: Role of the sender.
    role: Role


class Renew(_Message, frozen=True, tag=18):
    """Consumer to producer, in version 2: this will be fetched, be so good as to hold it. Never answered."""

    tid: _Id
    attempt: _Count


Message = (
    Hello
    | Ping
    | Pong
    | Bye
    | Reset
    | Offer
    | Grant
    | Accept
    | Ready
    | Landed
    | Refuse
    | Abort
    | Aborted
    | Renew
)


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One control message on the wire."""

    #: Incarnation of the sender: 16 random bytes, new for each life of an engine.
    src: Annotated[bytes, Meta(min_length=16, max_length=16)]
    #: Incarnation that the frame is meant for; empty while it isn't known.
    dst: Annotated[bytes, Meta(max_length=16)]
    #: Control address of the sender, so that also an unknown one can be answered.
    reply: _Address
    #: Number of the sender's stream; a sender never uses one twice. 0: outside any stream.
    mine: _Count
    #: Number of the receiver's stream that the sender knows; 0 while it knows none.
    yours: _Count
    #: Position in the sender's stream; HELLO has 0.
    seq: _Count
    #: How many frames of the receiver's stream the sender has read.
    ack: _Count
    body: Annotated[list[msgspec.Raw], Meta(max_length=65_536)]


_ENCODER = msgspec.msgpack.Encoder()
_FRAMES = msgspec.msgpack.Decoder(Frame)
_MESSAGES = msgspec.msgpack.Decoder(Message)
#: What decoding raises; RecursionError where somebody nested arrays for the sake of it.
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)


def as_text(reason: object) -> str:
    """A reason as a message can carry it: cut short, and without what UTF-8 has no bytes for.

    Errors come from anywhere: the name of a file that isn't text has halves of surrogate pairs in it.
    """
    return str(reason)[:_MOST_TEXT].encode(errors="replace").decode()


def encode_message(message: Message) -> bytes:
    """The message as it stands in a frame's body."""
    return _ENCODER.encode(message)


def encode_frame(frame: Frame) -> bytes:
    """The frame as it goes over the wire."""
    return _ENCODER.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Read a frame's header; its messages stay undecoded.

    Raises:
        RemoteProtocolError: This is no frame.
    """
    try:
        return _FRAMES.decode(data)
    except _MALFORMED as exc:
        raise RemoteProtocolError(f"not a frame: {exc}") from exc


def decode_messages(frame: Frame) -> list[Message]:
    """The messages of a frame, each checked for its form.

    Raises:
        RemoteProtocolError: One of them is malformed or unknown.
    """
    try:
        return [_MESSAGES.decode(raw) for raw in frame.body]
    except _MALFORMED as exc:
        raise RemoteProtocolError(f"malformed message: {exc}") from exc


def pack_blocks(groups: Sequence[GroupBlocks]) -> _Blocks:
    """Block lists for the wire: 4 bytes an id, little-endian."""
    return tuple((group.start, group.ids.astype("<u4").tobytes()) for group in groups)


def unpack_blocks(packed: _Blocks, layout: CacheLayout) -> tuple[GroupBlocks, ...]:
    """Block lists of a peer, checked against its layout.

    Raises:
        RemoteProtocolError: There are too few or too many groups, or an id out of range.
    """
    if len(packed) != len(layout.groups):
        raise RemoteProtocolError(f"block lists for {len(packed)} groups, not {len(layout.groups)}")
    groups = []
    for index, ((start, data), group) in enumerate(zip(packed, layout.groups, strict=True)):
        if len(data) % 4 or start % group.block_size:
            raise RemoteProtocolError(f"malformed block list of group {index}")
        ids = np.frombuffer(data, "<u4").astype(np.int64)
        if ids.size and int(ids.max()) >= group.blocks:
            raise RemoteProtocolError(
                f"group {index}: block {int(ids.max())} of a cache with {group.blocks} blocks"
            )
        groups.append(GroupBlocks(start=start, ids=ids))
    return tuple(groups)
