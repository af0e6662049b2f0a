"""The vector that is reduced: int32 lanes of which MIN gives the smallest over all ranks.

::

    lanes 0..8     what has to be the same on all ranks: format, number of the batch, round, size of the
                   batch, a hash of its keys (two lanes), size of the group; and the rank, of which the least
                   and the greatest are known
    lanes 8..16    the same, negated, so that MIN gives the largest, too
    lanes 16, 17   unit of the counts, and its negative; absent on a rank without a hit
    lane  18       the rank, where its batch can't be agreed on; else absent
    lane  19       0
    then           a count for each request of a round, and a severity, negated: the worst is the least

Its length is a constant and no option: gloo ends the process when ranks bring different ones. So it has
room for a whole round, whatever is in it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import DeviceError, LocalProtocolError, RemoteProtocolError
from aiokv.ranks.outcomes import Failed, Hit, Miss, Outcome
from aiokv.ranks.units import MOST, Blocks, Tokens

__all__ = [
    "HEADER",
    "LENGTH",
    "REQUESTS",
    "Finding",
    "Header",
    "Lanes",
    "compared",
    "encoded",
    "hashed",
    "read",
    "write",
]

#: Requests of one round.
REQUESTS = 256
HEADER = 20
#: Lanes of the vector. Another length is another format, and can't meet this one in a group.
LENGTH = HEADER + 2 * REQUESTS

_BLANK = array("i", bytes(4 * (LENGTH - HEADER)))
_FORMAT = 1
_SAME = 8
_UNIT, _FAULTY = 2 * _SAME, 2 * _SAME + 2
#: Of a lane that this rank has nothing to say in: MIN never picks it.
_ABSENT = MOST

_UNITS: dict[type, int] = {Blocks: 1, Tokens: 2}
_UNIT_NAMES = {1: "blocks", 2: "tokens"}

#: What the first lanes are, as messages say it.
_NAMES = ("format", "batch number", "round", "requests", "keys", "keys", "ranks", "rank")
_BATCH, _HASHES, _RANK = 1, (4, 5), 7


class Header(NamedTuple):
    """What a rank says of a round besides its outcomes.

    Attributes:
        batch: Number of the batch, counted by each rank for itself; wraps at 2**31.
        round: Which round of it.
        size: Requests of the batch.
        hashes: Of its keys; zeros without any.
        unit: Of its counts: a key of ``_UNIT_NAMES``, or 0 where it has none.
        rank: Of this rank.
        world: Ranks of the group.
        faulty: This rank's batch can't be agreed on.
    """

    batch: int
    round: int
    size: int
    hashes: tuple[int, int]
    unit: int
    rank: int
    world: int
    faulty: bool

    def write(self, vector: NDArray[np.int32]) -> None:
        """Put it into the first lanes of a vector."""
        same = (_FORMAT, self.batch, self.round, self.size, *self.hashes, self.world, self.rank)
        unit = (self.unit, -self.unit) if self.unit else (_ABSENT, _ABSENT)
        faulty = self.rank if self.faulty else _ABSENT
        lanes = array("i", (*same, *[-value for value in same], *unit, faulty, 0))
        vector.data[:HEADER] = lanes


class Finding(NamedTuple):
    """What a reduced header says."""

    #: The highest number of the batch that a rank had; this rank's own where all is well.
    batch: int
    #: Why the ranks can't agree; None if they can. Not for a rank whose own batch is faulty.
    error: LocalProtocolError | RemoteProtocolError | None


class Lanes(NamedTuple):
    """The outcomes of a batch as numbers, one for each request.

    Attributes:
        counts: What is there: of a hit its count, else 0.
        severities: Of a failure its severity, negated; else 0.
        unit: Of the counts, as in ``Header``.
        hollow: There are hits of nothing.
    """

    counts: list[int]
    severities: list[int]
    unit: int
    hollow: bool


def write(vector: NDArray[np.int32], header: Header, lanes: Lanes, first: int) -> None:
    """Fill a vector with a round.

    Args:
        vector: ``int32[LENGTH]``.
        header: Of the round.
        lanes: Of the batch.
        first: The first request of the round.
    """
    # Lists go through arrays of the standard library, which are several times faster than numpy's here.
    view = vector.data
    view[HEADER:] = _BLANK
    header.write(vector)
    for at, values in ((HEADER, lanes.counts), (HEADER + REQUESTS, lanes.severities)):
        part = array("i", values[first : first + REQUESTS])
        view[at : at + len(part)] = part


def read(vector: NDArray[np.int32], count: int) -> tuple[list[int], list[int]]:
    """Counts and severities of the first requests of a round."""
    view = vector.data
    lowest = HEADER + REQUESTS
    return view[HEADER : HEADER + count].tolist(), view[lowest : lowest + count].tolist()


def encoded(outcomes: Sequence[Outcome]) -> Lanes:
    """A batch as lanes.

    Raises:
        TypeError: Something in it is no outcome, or some count blocks and some tokens.
    """
    counts, severities = [0] * len(outcomes), [0] * len(outcomes)
    counted: type | None = None
    hollow = False
    for at, outcome in enumerate(outcomes):
        kind = type(outcome)
        if kind is Hit:
            held = outcome.held  # type: ignore[union-attr]
            if type(held) is not counted:
                if counted is not None:
                    raise TypeError(
                        "a batch counts blocks, or it counts tokens: convert one of them by the block size"
                    )
                counted = type(held)
                if counted not in _UNITS:
                    raise TypeError(f"request {at} of a batch: a Hit holds Blocks or Tokens, not {held!r}")
            counts[at] = count = held.count
            if not count:
                hollow = True
        elif kind is Failed:
            severities[at] = -outcome.severity  # type: ignore[union-attr]
        elif kind is not Miss:
            raise TypeError(f"request {at} of a batch is a Hit, Miss or Failed, not {outcome!r}")
    unit = 0 if counted is None else _UNITS[counted]
    return Lanes(counts, severities, unit, hollow)


def hashed(keys: Iterable[bytes] | None, size: int) -> tuple[int, int]:
    """62 bits of a hash of what the requests of a batch are, in two lanes; zeros where nobody says.

    Raises:
        TypeError: A key isn't ``bytes``.
        ValueError: There are more or fewer keys than requests.
    """
    if keys is None:
        return 0, 0
    listed = list(keys)
    if len(listed) != size:
        raise ValueError(f"{len(listed)} keys for {size} requests")
    try:
        # With lengths, so that keys can't be cut elsewhere and still make the same bytes.
        whole = array("q", map(len, listed)).tobytes() + b"".join(listed)
    except TypeError as error:
        raise TypeError(f"a key is bytes: {error}") from error
    digest = hashlib.blake2b(whole, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") & MOST, int.from_bytes(digest[4:], "little") & MOST


def compared(vector: NDArray[np.int32], mine: Header) -> Finding:
    """Look whether a reduced vector is one of ranks that came with the same batch.

    Args:
        vector: What the reduction gave.
        mine: What this rank put into it.

    Raises:
        DeviceError: It isn't the minimum over all ranks: the reduction was cut short.
    """
    lanes = vector.data[:HEADER].tolist()
    lows, highs = lanes[:_SAME], [-lane for lane in lanes[_SAME : 2 * _SAME]]
    if (lows[_RANK], highs[_RANK]) != (0, mine.world - 1):
        raise DeviceError(
            f"ranks {lows[_RANK]} to {highs[_RANK]} came into a reduction over {mine.world} ranks"
        )
    faulty = lanes[_FAULTY]
    if faulty != _ABSENT and not mine.faulty:
        return Finding(
            highs[_BATCH],
            RemoteProtocolError(f"the batch of rank {faulty} can't be agreed on: its own error says why"),
        )
    here = (_FORMAT, mine.batch, mine.round, mine.size, *mine.hashes, mine.world, mine.rank)
    differences = [
        _difference(at, low, high, here[at])
        for at, (low, high) in enumerate(zip(lows, highs, strict=True))
        if low != high and at != _RANK
    ]
    low, high = lanes[_UNIT], -lanes[_UNIT + 1]
    if low not in (_ABSENT, high):
        differences.append(f"{_UNIT_NAMES.get(low)} or {_UNIT_NAMES.get(high)}")
    if not differences:
        return Finding(highs[_BATCH], None)
    told = ", ".join(dict.fromkeys(differences))
    return Finding(highs[_BATCH], LocalProtocolError(f"the ranks came with different batches: {told}"))


def _difference(lane: int, low: int, high: int, here: int) -> str:
    if lane in _HASHES:
        return "other keys"
    return f"{_NAMES[lane]} {low} to {high} ({here} on this rank)"
