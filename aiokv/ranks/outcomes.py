"""What a rank found for one request, and what all of them come to."""

from __future__ import annotations

import asyncio
from enum import IntEnum

import msgspec

from aiokv.errors import CapacityError, PeerLostError, Refused
from aiokv.proto.fields import settle
from aiokv.ranks.units import Blocks, Tokens

__all__ = ["Failed", "Hit", "Miss", "Outcome", "Severity"]


class Severity(IntEnum):
    """What kind of error a request met, from the mildest to the worst."""

    #: Whoever asked doesn't want it any more.
    CANCELLED = 1
    #: It took too long.
    TIMEOUT = 2
    #: Who had it is gone, or can't be reached.
    LOST = 3
    #: Somebody said no.
    REFUSED = 4
    #: There is no room.
    CAPACITY = 5
    #: What was asked for can't be meant.
    INVALID = 6
    #: Anything else: what nobody expected.
    FAULT = 7

    @classmethod
    def of(cls, error: BaseException) -> Severity:
        """The kind of an exception: aiokv's own, or the built-in one that stands for the same."""
        # A GPU's is torch's own class, which need not be there, and else only a RuntimeError.
        if any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__):
            return cls.CAPACITY
        return next((kind for types, kind in _KINDS if isinstance(error, types)), cls.FAULT)


#: In this order: LayoutMismatch is Refused and a ValueError, DeadlineExceeded is no OSError but a
#: TimeoutError, which is.
_KINDS: tuple[tuple[tuple[type[BaseException], ...], Severity], ...] = (
    ((asyncio.CancelledError,), Severity.CANCELLED),
    ((TimeoutError,), Severity.TIMEOUT),
    ((Refused, PermissionError), Severity.REFUSED),
    ((CapacityError, MemoryError), Severity.CAPACITY),
    ((PeerLostError, ConnectionError), Severity.LOST),
    ((ValueError, TypeError), Severity.INVALID),
)


class Hit(msgspec.Struct, frozen=True, gc=False):
    """This much is there, from the beginning on and without a gap.

    Attributes:
        held: Blocks, or tokens; the same unit for all requests of a batch. A hit of nothing is agreed
            on as a miss.
    """

    held: Blocks | Tokens


class Miss(msgspec.Struct, frozen=True, gc=False):
    """Nothing is there, and nothing went wrong."""


class Failed(msgspec.Struct, frozen=True, gc=False):
    """It isn't known what is there, or what is can't be had. Not the same as nothing.

    Attributes:
        severity: The kind of error; of several ranks' the worst.

    Raises:
        ValueError: There is no such kind.
    """

    severity: Severity

    def __post_init__(self) -> None:
        if type(self.severity) is not Severity:
            settle(self, severity=Severity(self.severity))


Outcome = Hit | Miss | Failed
