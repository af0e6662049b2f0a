"""What the owner of a pool and those that share it say to each other, over a unix socket.

Each message is its length, four bytes, and msgpack. What is asked has an id, which the answer repeats; both
ends take messages in the order in which they were sent, which is what makes the answers mean something.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from aiokv.errors import RemoteProtocolError
from aiokv.offload.sharing.form import Groups
from aiokv.offload.sharing.keys import MOST_BYTES

__all__ = [
    "LENGTH", "MOST_DIGESTS", "MOST_FRAME", "VERSION", "Attach", "Clear", "Count", "Delete", "Detach", "Done",
    "Find", "Found", "FromGuest", "FromOwner", "Keep", "Kept", "Look", "Mapped", "Quit", "Refusal",
    "Release", "Removed", "Reset", "Room", "Short", "Spoilt", "There", "Welcome", "Written", "frame",
    "from_guest", "from_owner",
]  # fmt: skip

#: Of this protocol; others are refused.
VERSION = 1
#: Caches in one question: ranks of an instance.
MOST_DIGESTS = 1024
#: Of a message, in bytes: keys of a prefix of millions of tokens.
MOST_FRAME = 16 << 20
LENGTH = 4

_Key = Annotated[bytes, Meta(max_length=MOST_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Place = Annotated[int, Meta(ge=0, lt=2**48)]
_Id = Annotated[int, Meta(ge=0, lt=2**62)]
_Count = Annotated[int, Meta(ge=0, lt=2**62)]


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


# -- of those that share it


class Attach(_Message, tag=0):
    """First of all: who is there. ``digest`` names what its blocks hold, ``groups`` how large they are."""

    version: int
    digest: _Digest
    groups: Groups


class Mapped(_Message, tag=1):
    """So many places, from the first on, can be used there."""

    places: _Count


class Find(_Message, tag=2):
    """The longest prefix, to be held; answered by ``Found``."""

    id: _Id
    keys: list[_Key]


class Keep(_Message, tag=3):
    """Places for those of a prefix that lack; answered by ``Kept``, once nobody else writes any of them."""

    id: _Id
    keys: list[_Key]
    parent: _Key | None


class Written(_Message, tag=4):
    """Blocks of ``Kept.new`` are there, or won't be; they are held until released. Answered by ``Done``."""

    id: _Id
    places: list[_Place]
    ok: bool


class Release(_Message, tag=5):
    """Places are held no longer; each stands as often as it was given."""

    places: list[_Place]


class Spoilt(_Message, tag=6):
    """What is in these places, which are held, is not what it was. Answered by ``Done``."""

    id: _Id
    places: list[_Place]


class Count(_Message, tag=7):
    """How long the prefix is that is there; answered by ``Done``."""

    id: _Id
    keys: list[_Key]


class Delete(_Message, tag=8):
    """Drop these, whoever uses them; answered by ``Done``."""

    id: _Id
    keys: list[_Key]


class Clear(_Message, tag=9):
    """Drop all, of whatever cache; answered by ``Done``."""

    id: _Id


class Detach(_Message, tag=10):
    """Nothing of what is held is read or written any more, or will be."""


class Quit(_Message, tag=11):
    """The same of an attachment before, whose connection was lost: the one that got this ticket."""

    ticket: _Id


# -- of those that only ask what is there


class Look(_Message, tag=12):
    """First of all, in place of ``Attach``: nothing will be given to who is there. Not answered."""

    version: int


class There(_Message, tag=13):
    """How long the prefix is that can be loaded by whoever attaches with any of these digests.

    Answered by ``Done``.
    """

    id: _Id
    digests: Annotated[list[_Digest], Meta(min_length=1, max_length=MOST_DIGESTS)]
    keys: list[_Key]


# -- of the owner


class Welcome(_Message, tag=20):
    """To ``Attach``: how many places there will be, how many in a segment, and of what form.

    The ticket is nobody else's.
    """

    places: Annotated[int, Meta(ge=1, lt=2**48)]
    each: Annotated[int, Meta(ge=1, lt=2**48)]
    groups: Groups
    ticket: _Id


class Refusal(_Message, tag=21):
    """To ``Attach``: no. ``kind`` is ``layout``, ``capacity`` or ``refused``."""

    kind: str
    reason: str


class Room(_Message, tag=22):
    """A segment, whose descriptor comes with it."""

    first: _Place
    places: Annotated[int, Meta(ge=1, lt=2**48)]
    nbytes: Annotated[int, Meta(ge=1, lt=2**62)]


class Short(_Message, tag=23):
    """There will be no more segments."""

    reason: str


class Found(_Message, tag=24):
    """To ``Find``: places, each given once more; ``free`` in the pool by now."""

    id: _Id
    places: list[_Place]
    free: _Count


class Kept(_Message, tag=25):
    """To ``Keep``, see ``Offered``; ``new`` are given, ``pending`` the same guest is writing already."""

    id: _Id
    kept: _Count
    refused: _Count
    new: list[tuple[_Count, _Place]]
    pending: list[tuple[_Count, _Place]]
    free: _Count


class Done(_Message, tag=26):
    """To the others: how many."""

    id: _Id
    count: _Count
    free: _Count


class Removed(_Message, tag=27):
    """Blocks are not found any more; ``places`` of them are held by who is told."""

    keys: list[bytes]
    places: list[_Place]
    why: str


class Reset(_Message, tag=28):
    """Somebody else dropped all: what was given before this is worth nothing."""


FromGuest = (
    Attach | Mapped | Find | Keep | Written | Release | Spoilt | Count | Delete | Clear | Detach | Quit
    | Look | There
)  # fmt: skip
FromOwner = Welcome | Refusal | Room | Short | Found | Kept | Done | Removed | Reset

_FROM_GUEST: msgspec.msgpack.Decoder[FromGuest] = msgspec.msgpack.Decoder(FromGuest)
_FROM_OWNER: msgspec.msgpack.Decoder[FromOwner] = msgspec.msgpack.Decoder(FromOwner)


def frame(message: FromGuest | FromOwner) -> bytes:
    """A message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


def from_guest(body: bytes) -> FromGuest:
    """A message to the owner.

    Raises:
        RemoteProtocolError: It is none.
    """
    try:
        return _FROM_GUEST.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"no message of one that shares a pool: {error}") from error


def from_owner(body: bytes) -> FromOwner:
    """A message of the owner.

    Raises:
        RemoteProtocolError: It is none.
    """
    try:
        return _FROM_OWNER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"no message of a pool's owner: {error}") from error
