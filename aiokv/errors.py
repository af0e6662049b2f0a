"""Every error that aiokv raises, as one tree.

::

    AiokvError
     +-- ProtocolError               the rules of the protocol were broken
     |    +-- LocalProtocolError     by this side: a mistake in the calling code  (RuntimeError)
     |    +-- RemoteProtocolError    by the peer: it sent what it must not        (ConnectionError)
     +-- ClosedError                 you closed it                                (RuntimeError)
     +-- PeerLostError               the world did: dead, cut or silent           (ConnectionError)
     +-- TransferAborted             one side gave the transfer up
     +-- DeadlineExceeded            its time is over                             (TimeoutError)
     +-- Refused                     the other side won't, and says why
     |    +-- LayoutMismatch         the two caches don't hold the same KV        (ValueError)
     +-- InvalidBlocks               block ids that can't be meant                (ValueError)
     +-- CapacityError               a configured or physical limit is reached    (MemoryError)
     +-- BusyError                   two users of one thing                       (RuntimeError)
     +-- DeviceError                 the device or the copy failed                (RuntimeError)

Each is also the built-in kind that callers who know nothing of aiokv expect, so ``except
TimeoutError`` and ``except ConnectionError`` work. Foreign errors (zmq, NCCL, CUDA, the
operating system) are translated once, where they appear, and chained as ``__cause__``.
"""

from __future__ import annotations

__all__ = [
    "AiokvError",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "DeadlineExceeded",
    "DeviceError",
    "InvalidBlocks",
    "LayoutMismatch",
    "LocalProtocolError",
    "PeerLostError",
    "ProtocolError",
    "Refused",
    "RemoteProtocolError",
    "TransferAborted",
]


class AiokvError(Exception):
    """Base of everything that aiokv raises."""


class ProtocolError(AiokvError):
    """The rules of the protocol were broken; the subclass says by whom."""


class LocalProtocolError(ProtocolError, RuntimeError):
    """The calling code did what the protocol doesn't allow (a layer announced twice, say)."""


class RemoteProtocolError(ProtocolError, ConnectionError):
    """The peer sent what it must not. Its session is reset; nobody else's is."""


class ClosedError(AiokvError, RuntimeError):
    """The engine or the transfer was closed by its own user."""


class PeerLostError(AiokvError, ConnectionError):
    """The peer is dead, cut off, or silent beyond the bound. Retryable with a new attempt."""


class TransferAborted(AiokvError):
    """One of the two sides gave the transfer up; the message says which, and why."""


class DeadlineExceeded(AiokvError, TimeoutError):
    """The transfer's deadline passed; the message says how far it got."""


class Refused(AiokvError):
    """The other side answered that it won't do this, and why."""


class LayoutMismatch(Refused, ValueError):
    """The two caches don't hold the same KV; the message names each difference."""


class InvalidBlocks(AiokvError, ValueError):
    """Block ids out of range, twice in one call, or too few for the tokens asked for."""


class CapacityError(AiokvError, MemoryError):
    """A limit (memory, queue, number of parked grants) is reached; the message names it."""


class BusyError(AiokvError, RuntimeError):
    """Two users of one thing: blocks still leased, an id already live, a second waiter."""


class DeviceError(AiokvError, RuntimeError):
    """The device, or a copy on it, failed; also when blocks could not be shown to be quiet."""
