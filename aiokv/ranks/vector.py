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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import DeviceError, LocalProtocolError, RemoteProtocolError
from aiokv.proto.fields import octets
from aiokv.ranks.outcomes import Failed, Hit, Miss, Outcome, Severity
from aiokv.ranks.units import MOST, Blocks, Tokens

__all__ = ["HEADER", "LENGTH", "REQUESTS", "Finding", "Header", "Lanes", "compared", "encoded", "hashed"]

#: Requests of one round.
REQUESTS = 256
HEADER = 20
#: Lanes of the vector. Another length is another format, and can't meet this one in a group.
LENGTH = HEADER + 2 * REQUESTS

_FORMAT = 1
_SAME = 8
_UNIT, _FAULTY = 2 * _SAME, 2 * _SAME + 2
#: Of a lane that this rank has nothing to say in: MIN never picks it.
_ABSENT = MOST

#: Bits of their own, so that both together show.
_UNITS: dict[type, int] = {Blocks: 1, Tokens: 2}
_UNIT_NAMES = {1: "blocks", 2: "tokens"}

#: What the first lanes are, as messages say it.
_NAMES = ("format", "batch number", "round", "requests", "keys", "keys", "ranks", "rank")
_BATCH, _HASHES, _RANK = 1, (4, 5), 7


@dataclass(frozen=True, slots=True)
class Header:
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
        vector[:HEADER] = (*same, *(-value for value in same), *unit, faulty, 0)


class Finding(NamedTuple):
    """What a reduced header says."""

    #: The highest number of the batch that a rank had; this rank's own where all is well.
    batch: int
    #: Why the ranks can't agree; None if they can. Not for a rank whose own batch is faulty.
    error: LocalProtocolError | RemoteProtocolError | None


@dataclass(frozen=True, slots=True)
class Lanes:
    """The outcomes of a batch as numbers, an ``int32[requests]`` each.

    Attributes:
        counts: What is there: of a hit its count, else 0.
        severities: Of a failure its severity, negated; else 0.
        unit: Of the counts, as in ``Header``.
    """

    counts: NDArray[np.int32]
    severities: NDArray[np.int32]
    unit: int


def encoded(outcomes: Sequence[Outcome]) -> Lanes:
    """A batch as lanes.

    Raises:
        TypeError: Something in it is no outcome, or some count blocks and some tokens.
    """
    counts, severities = [0] * len(outcomes), [0] * len(outcomes)
    units = 0
    for at, outcome in enumerate(outcomes):
        kind = type(outcome)
        if kind is Hit:
            held = cast("Hit", outcome).held
            unit = _UNITS.get(type(held), 0)
            if not unit:
                raise TypeError(f"request {at} of a batch: a Hit holds Blocks or Tokens, not {held!r}")
            units |= unit
            counts[at] = held.count
        elif kind is Failed:
            severities[at] = -Severity(cast("Failed", outcome).severity)
        elif kind is not Miss:
            raise TypeError(f"request {at} of a batch is a Hit, Miss or Failed, not {outcome!r}")
    if units not in (0, *_UNITS.values()):
        raise TypeError("a batch counts blocks, or it counts tokens: convert one of them by the block size")
    return Lanes(np.array(counts, np.int32), np.array(severities, np.int32), units)


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
    # With lengths, so that keys can't be cut elsewhere and still make the same bytes.
    lengths = np.array([len(octets(key, "a key")) for key in listed], np.int64)
    digest = hashlib.blake2b(lengths.tobytes() + b"".join(listed), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little") & MOST, int.from_bytes(digest[4:], "little") & MOST


def compared(vector: NDArray[np.int32], mine: Header) -> Finding:
    """Look whether a reduced vector is one of ranks that came with the same batch.

    Args:
        vector: What the reduction gave.
        mine: What this rank put into it.

    Raises:
        DeviceError: It isn't the minimum over all ranks: the reduction was cut short.
    """
    lanes: list[int] = vector[:HEADER].tolist()
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
