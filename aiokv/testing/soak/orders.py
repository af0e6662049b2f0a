"""What the parent of a soak and its workers say to each other: lines of JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Changed",
    "Ended",
    "Explain",
    "Explained",
    "Finish",
    "Health",
    "Move",
    "Opened",
    "Order",
    "Probe",
    "Promised",
    "Reopen",
    "Report",
    "Start",
    "Trip",
    "decode_order",
    "decode_report",
    "encode",
]

Role = Literal["producer", "consumer"]


class Start(msgspec.Struct, tag=True):
    """What a worker is."""

    slot: int
    #: Best first.
    transports: list[str]
    #: Order of the axes of its cache's tensors; empty for K and V as two tensors.
    axes: str
    #: Ports by which others reach its control and its data port.
    control: int
    data: int
    uvloop: bool
    seed: int


# -- to a worker


class Move(msgspec.Struct, tag=True):
    """One side of a transfer."""

    tid: str
    role: Role
    #: Address of the other side; empty: it names us.
    peer: str
    blocks: int
    deadline_s: float
    #: Between two layers (producer), at most.
    pause_s: float
    #: When it is cancelled; none at all, once or several times.
    cancels_s: list[float]
    #: Whether it waits for each layer (consumer).
    layerwise: bool


class Reopen(msgspec.Struct, tag=True):
    """Close the engine, whatever goes on, and open another."""


class Probe(msgspec.Struct, tag=True):
    """Say how you are."""


class Trip(msgspec.Struct, tag=True):
    """Stop yourself (SIGSTOP) just before so many more copies, or sends, were submitted."""

    after: int


class Explain(msgspec.Struct, tag=True):
    """Say what each transfer waits for."""


class Finish(msgspec.Struct, tag=True):
    """Close everything, say what is left, and end."""


Order = Start | Move | Reopen | Probe | Trip | Explain | Finish

# -- to the parent


class Opened(msgspec.Struct, tag=True):
    """An engine is open; the ports that its own sockets are bound to."""

    control: int
    data: int


class Promised(msgspec.Struct, tag=True):
    """What a producer is going to write: digest of all layers."""

    tid: str
    digest: str


class Ended(msgspec.Struct, tag=True):
    """One side of a transfer is over."""

    tid: str
    role: Role
    #: Kind of the error; empty if it ended well.
    error: str = ""
    text: str = ""
    #: Of what is in place (consumer that ended well).
    digest: str = ""
    #: Seconds from the beginning to the end, and what it went by.
    took_s: float = 0
    transport: str = ""
    nbytes: int = 0


class Explained(msgspec.Struct, tag=True):
    """What goes on, in lines for people."""

    text: str


class Changed(msgspec.Struct, tag=True):
    """Something is wrong in a worker itself."""

    text: str


class Health(msgspec.Struct, tag=True):
    """How a worker is."""

    #: Bytes of memory of its own: what it maps of others comes and goes with its links.
    resident: int
    descriptors: int
    tasks: int
    threads: int
    #: Mappings of shared memory.
    mappings: int
    sessions: int
    #: What it holds of transfers.
    holds: dict[str, int]
    #: It was said at the end, with everything closed.
    finished: bool = False


Report = Opened | Promised | Ended | Explained | Changed | Health

_ENCODER = msgspec.json.Encoder()
_ORDERS = msgspec.json.Decoder(Order)
_REPORTS = msgspec.json.Decoder(Report)


def encode(said: Order | Report) -> bytes:
    """A line."""
    return _ENCODER.encode(said) + b"\n"


def decode_order(line: bytes) -> Order:
    """What a worker was told."""
    return _ORDERS.decode(line)


def decode_report(line: bytes) -> Report:
    """What a worker said."""
    return _REPORTS.decode(line)
