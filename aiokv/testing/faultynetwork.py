"""A control plane with faults: frames are lost, doubled, late and out of order, links are cut, engines die.

Chance comes from a seed, one stream of it for each link, so that what happens to a link's third frame
doesn't depend on what other links did; a test can also say what shall happen. The trace tells afterwards.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from aiokv.control.memory import MemoryChannel, MemoryNetwork, MemoryPort

__all__ = ["Event", "Fate", "Faults", "FaultyNetwork"]

#: What happens to one frame; a number delays it by so many seconds.
Fate = Literal["pass", "drop", "duplicate", "reorder"] | float

_Setting = TypeVar("_Setting")

# A frame that shall be overtaken goes on after so many seconds if none comes to overtake it.
_OVERTAKEN_WITHIN = 0.01


@dataclass(frozen=True, slots=True)
class Faults:
    """How a link treats its frames: probabilities, and the bounds of the delay in seconds.

    Delays keep the frames of a link in order, as a connection does. A frame that is reordered goes behind
    the next one.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    reorder: float = 0.0


class Event(NamedTuple):
    """One line of the trace."""

    time: float  # the loop's, in seconds
    what: str  # "arrive", "drop", "duplicate", "reorder", "delay", "hold", "lose", "cut", "heal", "kill"
    source: str
    target: str
    number: int  # the frame's among those sent on the link, from 1; 0 where it is about no frame


class _Frame(NamedTuple):
    port: MemoryPort
    data: bytes
    number: int


@dataclass(slots=True)
class _Link:
    """One direction between two addresses."""

    source: str
    target: str
    random: random.Random
    sent: int = 0
    script: deque[Fate] = field(default_factory=deque)
    line: deque[tuple[float, _Frame]] = field(default_factory=deque)  # under way, by time of arrival
    timer: asyncio.TimerHandle | None = None  # for the head of the line; None while that is empty
    overtaken: list[_Frame] = field(default_factory=list)  # go behind the next frame
    patience: asyncio.TimerHandle | None = None  # sends those on if none comes; None while there are none
    held: list[_Frame] = field(default_factory=list)  # wait for the link to be healed

    def clear_overtaken(self) -> None:
        self.overtaken.clear()
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None

    def clear(self) -> None:
        self.clear_overtaken()
        self.line.clear()
        self.held.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class FaultyNetwork(MemoryNetwork):
    """A ``MemoryNetwork`` with faults.

    Without faults asked for it behaves as a ``MemoryNetwork``. In all methods ``None`` for an address stands
    for any; the most particular setting counts.

    Args:
        seed: Decides all chance; print it where a test fails.
        faults: What every link does that has no faults of its own.
        queue: Frames of one port that may be under way at once.

    Attributes:
        trace: What happened to the last thousand frames and links, oldest first.
    """

    def __init__(self, seed: int, faults: Faults | None = None, *, queue: int = 4096) -> None:
        super().__init__(queue=queue)
        self.trace: deque[Event] = deque(maxlen=1000)
        self._seed = seed
        self._faults: dict[tuple[str | None, str | None], Faults] = {(None, None): faults or Faults()}
        self._cuts: dict[tuple[str | None, str | None], bool] = {}  # and whether frames are held
        self._links: dict[tuple[str, str], _Link] = {}
        self._dead: weakref.WeakSet[MemoryChannel] = weakref.WeakSet()

    # -- what a test asks for ---------------------------------------------------------------------

    def set_faults(self, faults: Faults, source: str | None = None, target: str | None = None) -> None:
        """Treat frames from ``source`` to ``target`` so from now on."""
        self._faults[source, target] = faults

    def script(self, source: str, target: str, *fates: Fate) -> None:
        """Decide for the next frames from ``source`` to ``target``, one each; then chance again."""
        self._link(source, target).script.extend(fates)

    def cut(
        self, source: str | None, target: str | None, *, both_ways: bool = True, hold: bool = False
    ) -> None:
        """Let nothing through, what is under way included.

        Args:
            source: One end.
            target: The other end.
            both_ways: Also from ``target`` to ``source``.
            hold: Keep the frames for ``heal``, as a connection that stalls does; else they are lost.
        """
        for a, b in [(source, target), (target, source)][: 2 if both_ways else 1]:
            self._cuts[a, b] = hold
            self._note("cut", a or "*", b or "*")

    def heal(self, source: str | None = None, target: str | None = None) -> None:
        """Undo the cut between the two, both ways; without arguments every cut."""
        for a, b in list(self._cuts):
            if (source, target) in ((None, None), (a, b), (b, a)):
                del self._cuts[a, b]
                self._note("heal", a or "*", b or "*")
        for link in self._links.values():
            if self._cut(link) is None:
                held, link.held = link.held, []
                for frame in held:  # before what is in line, which was sent later
                    self._pass(link, frame)

    def kill(self, address: str, *, keep: bool = False) -> None:
        """End the channel at ``address`` as SIGKILL would, so that another one can bind the address.

        It gets nothing any more, and what it sends vanishes; what it had sent is still under way.

        Args:
            address: The channel's.
            keep: Leave what was under way to it for the next channel there. ZeroMQ does both: what the
                dead process's kernel had taken is lost, what the sender still holds reaches the new one.

        Raises:
            ValueError: No channel is bound there.
        """
        channel = self._bound.pop(address, None)
        if channel is None:
            raise ValueError(f"{address}: nobody is there")
        self._dead.add(channel)
        self._note("kill", address, address)
        undelivered = channel.discard()
        if keep:
            for port, data in undelivered:
                port.pending += 1
                self.arrive(port, data)
            return
        for link in self._links.values():
            if self.resolve(link.target) == address:
                for frame in [entry for _, entry in link.line] + link.overtaken + link.held:
                    self._lose(link, frame)
                link.clear()

    # -- what happens to a frame ------------------------------------------------------------------

    def carry(self, port: MemoryPort, frame: bytes) -> None:
        """Bring a frame, or fail to."""
        link = self._link(port.owner.address, port.target)
        link.sent += 1
        entry = _Frame(port, frame, link.sent)
        copies, overtaken, delay = self._decide(link)
        if port.owner in self._dead or copies == 0:
            self._lose(link, entry, "lose" if copies else "drop")
            return
        if copies > 1:
            port.pending += 1
            self._note("duplicate", link.source, link.target, entry.number)
        if overtaken:
            self._note("reorder", link.source, link.target, entry.number)
            link.overtaken += [entry] * copies
            if link.patience is None:
                loop = asyncio.get_running_loop()
                link.patience = loop.call_later(_OVERTAKEN_WITHIN, self._put_in_line, link, [], 0.0)
            return
        if delay > 0:
            self._note("delay", link.source, link.target, entry.number)
        self._put_in_line(link, [entry] * copies, delay)

    def _decide(self, link: _Link) -> tuple[int, bool, float]:
        """How often a frame arrives, whether the next one overtakes it, and its delay in seconds."""
        # All are drawn for each frame, also when not needed: with one probability changed, the rest
        # of what happens stays.
        drop, duplicate, reorder, delay = (link.random.random() for _ in range(4))
        if link.script:
            fate = link.script.popleft()
            if not isinstance(fate, str):
                return 1, False, float(fate)
            return {"drop": 0, "duplicate": 2}.get(fate, 1), fate == "reorder", 0.0
        faults = self._setting(self._faults, link) or Faults()
        low, high = faults.delay
        copies = 0 if drop < faults.drop else 2 if duplicate < faults.duplicate else 1
        return copies, reorder < faults.reorder, low + (high - low) * delay

    def _put_in_line(self, link: _Link, frames: list[_Frame], delay: float) -> None:
        frames = frames + link.overtaken
        link.clear_overtaken()
        if delay <= 0 and not link.line:
            for frame in frames:
                self._pass(link, frame)
            return
        loop = asyncio.get_running_loop()
        due = max(loop.time() + delay, link.line[-1][0] if link.line else 0.0)
        link.line.extend((due, frame) for frame in frames)
        if link.timer is None and link.line:
            link.timer = loop.call_at(link.line[0][0], self._arrivals, link)

    def _arrivals(self, link: _Link) -> None:
        # By what the timer was set for and not by the clock, which a loop may round.
        due = link.line[0][0]
        while link.line and link.line[0][0] <= due:
            self._pass(link, link.line.popleft()[1])
        link.timer = None
        if link.line:
            link.timer = asyncio.get_running_loop().call_at(link.line[0][0], self._arrivals, link)

    def _pass(self, link: _Link, frame: _Frame) -> None:
        hold = self._cut(link)
        if hold is None:
            self._note("arrive", link.source, link.target, frame.number)
            self.arrive(frame.port, frame.data)
        elif hold:
            self._note("hold", link.source, link.target, frame.number)
            link.held.append(frame)
        else:
            self._lose(link, frame)

    def _lose(self, link: _Link, frame: _Frame, what: str = "lose") -> None:
        frame.port.pending -= 1
        self._note(what, link.source, link.target, frame.number)

    # -- bookkeeping ------------------------------------------------------------------------------

    def _link(self, source: str, target: str) -> _Link:
        link = self._links.get((source, target))
        if link is None:
            chance = random.Random(f"{self._seed} {source} {target}")  # noqa: S311
            link = self._links[source, target] = _Link(source, target, chance)
        return link

    def _cut(self, link: _Link) -> bool | None:
        """None: not cut. Else whether its frames are held."""
        return self._setting(self._cuts, link)

    def _setting(
        self, settings: dict[tuple[str | None, str | None], _Setting], link: _Link
    ) -> _Setting | None:
        source, target = link.source, self.resolve(link.target)
        for ends in ((source, target), (source, None), (None, target), (None, None)):
            if ends in settings:
                return settings[ends]
        return None

    def _note(self, what: str, source: str, target: str, number: int = 0) -> None:
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:  # a link is cut before anything runs
            now = 0.0
        self.trace.append(Event(now, what, source, target, number))
