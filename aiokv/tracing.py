"""What each transfer did and when, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A ``Recorder`` is given to the engines of a process; for each of them the file has a process of its
own, and in it for each part of a transfer a bar of its states: *queued* until granted, *granted*
until the first bytes may move, *moving*, and *draining* until nothing in flight touches its blocks.
Marks say which layer moved when, how the part ended, and when a task that waited for it woke.
Arrows lead from a consumer's grant to its producer, and from the producer's first bytes back.

Nothing is recorded, and next to nothing spent, by an engine that has no recorder.

Times are ``time.monotonic_ns()``, which all processes of a host share, so files of one host are
merged as they are. Between hosts only their wall clocks can be compared: ``merge`` then shifts
each host by its own, and what those differ by, as much as milliseconds under NTP, is in the file.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aiokv.proto.messages import Role
from aiokv.proto.parts import State
from aiokv.proto.transfers import Part, Transfer

__all__ = ["Recorder", "main", "merge"]

#: What the time in each state is called.
_NAMES = {
    State.OFFERED: "queued",
    State.GRANTED: "granted",
    State.MOVING: "moving",
    State.DRAINING: "draining",
}
#: For the arrows between the two sides: which side's step into a state they lead from and to.
_ARROWS: dict[tuple[Role, State], tuple[str, str]] = {
    ("consumer", State.GRANTED): ("s", "grant"),
    ("producer", State.GRANTED): ("f", "grant"),
    ("producer", State.MOVING): ("s", "bytes"),
    ("consumer", State.MOVING): ("f", "bytes"),
}
#: Transfers that are over and that somebody may yet wake from.
_MOST_ENDED = 1024


class _Row(NamedTuple):
    """One event of the file, but for the engine that it belongs to."""

    phase: str  # X: a bar, i: a mark, s and f: the ends of an arrow
    name: str
    at: int  # ns
    lane: int
    lasted: int = 0  # ns
    more: dict[str, Any] | None = None
    arrow: str = ""


@dataclass(slots=True)
class _Bar:
    """A part that has not ended."""

    lane: int
    began: int
    since: int
    nbytes: int = 0


class Recorder:
    """Takes down what engines of this process do. Belongs to their loop's thread, but for ``write``.

    Args:
        name: Says in the file what this process is: "prefill", say.
        limit: Events kept at most, about 300 bytes each; what comes later is counted and dropped.

    Attributes:
        dropped: Events that were dropped.

    Raises:
        ValueError: The limit is not positive.
    """

    def __init__(self, name: str = "", *, limit: int = 1_000_000) -> None:
        if limit < 1:
            raise ValueError(f"limit is a number of events of at least 1, not {limit}")
        self.dropped = 0
        self._name = name
        self._left = limit
        self._tracks: list[_Track] = []

    def track(self, address: str, incarnation: bytes) -> _Track:
        """What one life of an engine tells; called by the engine when it is entered."""
        track = _Track(self, address, incarnation)
        self._tracks.append(track)
        return track

    def admit(self) -> bool:
        """Whether one more event is kept; called by the tracks."""
        if self._left:
            self._left -= 1
            return True
        self.dropped += 1
        return False

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what there is so far. Blocks: not for the loop's thread while it serves others.

        May be called from any thread, and more than once.

        Raises:
            OSError: The file can't be written.
        """
        events: list[dict[str, Any]] = []
        for number, track in enumerate(list(self._tracks), 1):
            label = f"{self._name} {track.address}".strip()
            events.append(_meta("process_name", number, f"{label} (process {os.getpid()})"))
            events.extend(_meta("thread_name", number, f"lane {lane}", lane) for lane in range(track.lanes))
            events.extend(_event(row, number) for row in track.rows())
        _write(path, events, [_Clock.here()], self.dropped)


class _Track:
    """One engine's bars, marks and arrows; see ``engine.stopwatch.Track``."""

    def __init__(self, recorder: Recorder, address: str, incarnation: bytes) -> None:
        self.address = address
        #: Lanes that were ever in use; each has one bar at a time.
        self.lanes = 0
        self._recorder = recorder
        self._me = incarnation.hex()[:12]
        self._rows: list[_Row] = []
        self._bars: dict[Part, _Bar] = {}
        self._free: list[int] = []
        #: Lanes of transfers that are over.
        self._ended: dict[Transfer, int] = {}

    def stepped(self, part: Part, before: State | None, now: int) -> None:
        """A part entered the state that it is in."""
        bar = self._bars.get(part)
        if bar is None:
            bar = self._bars[part] = _Bar(self._lane(), now, now)
        elif before is not None:
            self._add(_Row("X", _NAMES[before], bar.since, bar.lane, now - bar.since))
            bar.since = now
        if part.ended:
            self._add(_Row("i", part.state.value, now, bar.lane))
            self._add(_whole(part, bar, now))
            del self._bars[part]
            heapq.heappush(self._free, bar.lane)
            self._ended[part.transfer] = bar.lane
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        elif (part.role, part.state) in _ARROWS and part.session is not None:
            phase, name = _ARROWS[part.role, part.state]
            ends = (self._me, part.session.incarnation.hex()[:12])
            producer, consumer = ends if part.role == "producer" else reversed(ends)
            arrow = f"{part.transfer.tid}#{part.transfer.attempt} {producer} {consumer} {name}"
            self._add(_Row(phase, name, now, bar.lane, arrow=arrow))

    def moved(self, part: Part, layer: int, nbytes: int, now: int, *, through: bool) -> None:
        """Bytes of a layer of a part moved."""
        bar = self._bars.get(part)
        if bar is not None:
            bar.nbytes += nbytes
            if through:
                self._add(_Row("i", "moved", now, bar.lane, more={"layer": layer}))

    def woke(self, transfer: Transfer, now: int) -> None:
        """A task that waited for the end of the transfer runs again."""
        lane = self._ended.pop(transfer, None)
        if lane is not None:
            self._add(_Row("i", "woke", now, lane, more={"transfer": transfer.tid}))

    def rows(self) -> Iterator[_Row]:
        """All there is, bars of parts that have not ended as long as they are now."""
        yield from list(self._rows)
        now = time.monotonic_ns()
        for part, bar in list(self._bars.items()):
            if part.state in _NAMES:
                yield _Row("X", _NAMES[part.state], bar.since, bar.lane, max(0, now - bar.since))
            yield _whole(part, bar, now)

    def _add(self, row: _Row) -> None:
        if self._recorder.admit():
            self._rows.append(row)

    def _lane(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.lanes += 1
        return self.lanes - 1


def _whole(part: Part, bar: _Bar, now: int) -> _Row:
    """The bar of a part's whole life, with what is known of it."""
    transfer = part.transfer
    more = {
        "transfer": transfer.tid,
        "attempt": transfer.attempt,
        "role": part.role,
        "state": part.state.value,
        "peer": part.session.address if part.session is not None else "",
        "transport": part.link,
        "bytes": bar.nbytes,
        "error": str(part.life.error or ""),
        "traceparent": transfer.trace or part.peer_trace,
        "traceparent of the peer": part.peer_trace,
    }
    return _Row(
        "X",
        f"{transfer.tid} ({part.role})",
        bar.began,
        bar.lane,
        max(0, now - bar.began),
        {name: value for name, value in more.items() if value != ""},
    )


class _Clock(msgspec.Struct, frozen=True):
    """What relates times in a file to those in others."""

    #: Tells one boot of one host from all others: within it, monotonic times compare.
    boot: str
    host: str
    #: Nanoseconds to add to a monotonic time for the wall clock's.
    wall: int

    @classmethod
    def here(cls) -> _Clock:
        """This host's."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:  # not Linux
            boot = platform.node()
        return cls(boot, platform.node(), time.time_ns() - time.monotonic_ns())


class _About(msgspec.Struct):
    """What a file says of itself."""

    clocks: list[_Clock]
    dropped: int = 0
    #: How times of several hosts were made comparable.
    alignment: str = ""


class _Others(msgspec.Struct):
    aiokv: _About


class _File(msgspec.Struct):
    traceEvents: list[dict[str, Any]]  # noqa: N815 - the form is Chrome's
    otherData: _Others  # noqa: N815
    displayTimeUnit: str = "ms"  # noqa: N815


def merge(paths: Iterable[str | os.PathLike[str]], into: str | os.PathLike[str]) -> None:
    """Put what several recorders wrote into one file, both sides of a transfer say. Blocks.

    Files of one boot of one host share a clock. Those of other hosts are shifted by the difference
    of the hosts' wall clocks, which nothing corrects; the file says so under ``otherData``.

    Args:
        paths: Files that ``Recorder.write`` or ``merge`` wrote.
        into: The file to write; it may be one of them.

    Raises:
        OSError: A file can't be read or written.
        ValueError: A file is none of a recorder's, or is given twice; the message names it.
    """
    paths = list(paths)
    seen: set[Path] = set()
    for path in paths:
        if (real := Path(path).resolve()) in seen:
            raise ValueError(f"{os.fspath(path)} is given twice: its events would be doubled")
        seen.add(real)
    events: list[dict[str, Any]] = []
    clocks: list[_Clock] = []
    dropped = processes = 0
    for path in paths:
        found = _read(path)
        about = found.otherData.aiokv
        clocks.extend(about.clocks)
        dropped += about.dropped
        # What was merged before is on its first clock already.
        shift = 0 if about.clocks[0].boot == clocks[0].boot else about.clocks[0].wall - clocks[0].wall
        numbers = [event["pid"] for event in found.traceEvents]
        for event in found.traceEvents:
            event["pid"] += processes
            if "ts" in event:
                event["ts"] += shift / 1000
        events.extend(found.traceEvents)
        processes += max(numbers, default=0)
    _write(into, events, clocks, dropped)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``python -m aiokv trace a.json b.json --into both.json``."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv trace",
        description="Put traces of several processes into one file, for https://ui.perfetto.dev.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what a recorder wrote")
    parser.add_argument("--into", required=True, metavar="FILE", help="the file to write")
    given = parser.parse_args(arguments)
    try:
        merge(given.files, given.into)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    return 0


def _read(path: str | os.PathLike[str]) -> _File:
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        raise ValueError(f"{os.fspath(path)} is no trace of aiokv's: {error}") from error
    if not found.otherData.aiokv.clocks:
        raise ValueError(f"{os.fspath(path)} is no trace of aiokv's: it names no clock")
    return found


def _write(
    path: str | os.PathLike[str], events: list[dict[str, Any]], clocks: Sequence[_Clock], dropped: int
) -> None:
    known = list({clock.boot: clock for clock in reversed(clocks)}.values())[::-1]
    hosts = ", ".join(dict.fromkeys(clock.host for clock in known))
    alignment = (
        f"by the wall clocks of {hosts}; what those differ by is in the times" if len(known) > 1 else ""
    )
    file = _File(events, _Others(_About(known, dropped, alignment)))
    Path(path).write_bytes(msgspec.json.encode(file))


def _event(row: _Row, process: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": row.phase,
        "name": row.name,
        "cat": "aiokv",
        "ts": row.at / 1000,
        "pid": process,
        "tid": row.lane,
    }
    match row.phase:
        case "X":
            event["dur"] = row.lasted / 1000
        case "i":
            event["s"] = "t"
        case _:
            event["id"] = row.arrow
            if row.phase == "f":
                event["bp"] = "e"
    if row.more:
        event["args"] = row.more
    return event


def _meta(name: str, process: int, label: str, lane: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": lane, "args": {"name": label}}
