"""How long parts are in each state of their life, and who else is told of it as it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiokv.engine.histogram import Histogram, Times
from aiokv.proto.messages import Role
from aiokv.proto.parts import State
from aiokv.proto.transfers import Part, Transfer

__all__ = ["Stopwatch", "Trace", "Track"]

_ROLES: tuple[Role, ...] = ("producer", "consumer")
#: States that a part leaves.
_TIMED = (State.OFFERED, State.GRANTED, State.MOVING, State.DRAINING)


class Track(Protocol):
    """Is told of one engine's transfers, on the loop's thread; times are the engine's clock (ns)."""

    def stepped(self, part: Part, before: State | None, now: int) -> None:
        """A part entered the state that it is in; ``before`` is None where it is new."""

    def moved(self, part: Part, layer: int, nbytes: int, now: int, *, through: bool) -> None:
        """Bytes of a layer of a part are in place (consumer), or handed over (producer that sends).

        Args:
            part: The part.
            layer: The layer.
            nbytes: How many, since it was told last.
            now: When.
            through: Whether those were the layer's last.
        """

    def woke(self, transfer: Transfer, now: int) -> None:
        """A task that waited for the end of the transfer runs again."""


class Trace(Protocol):
    """What ``TransferEngine(trace=...)`` takes; ``aiokv.tracing.Recorder`` is one."""

    def track(self, address: str, incarnation: bytes) -> Track:
        """What is told of one life of an engine.

        Args:
            address: Where peers reach it.
            incarnation: What this life of it is called among its peers.
        """


class Stopwatch:
    """Times the states of one engine's parts.

    Args:
        clock: The time (ns).
        track: Is told of each step, too; None: nobody is.
    """

    def __init__(self, clock: Callable[[], int], track: Track | None) -> None:
        self._clock = clock
        self._track = track
        self._times = {role: {state: Histogram() for state in _TIMED} for role in _ROLES}
        #: When each part that has not ended entered its state (ns).
        self._since: dict[Part, int] = {}

    def stepped(self, part: Part, before: State | None) -> None:
        """A part entered the state that it is in; ``before`` is None where it is new."""
        now, life = self._clock(), part.life
        if before is not None:
            self._times[part.role][before].add(now - self._since[part])
        if life.state is life.outcome:  # it ended
            del self._since[part]
        else:
            self._since[part] = now
        if self._track is not None:
            self._track.stepped(part, before, now)

    def moved(self, part: Part, layers: Sequence[int], nbytes: int, through: int) -> None:
        """So many bytes of each of some layers of a part moved; ``through``: mask of those that these end."""
        if self._track is not None:
            now = self._clock()
            for layer in layers:
                self._track.moved(part, layer, nbytes, now, through=bool(through >> layer & 1))

    def woke(self, transfer: Transfer) -> None:
        """A task that waited for the end of a transfer runs again."""
        if self._track is not None:
            self._track.woke(transfer, self._clock())

    def snapshot(self) -> dict[tuple[str, str], Times]:
        """Times by role and state. May be called from any thread."""
        return {
            (role, state.value): times.snapshot()
            for role, states in self._times.items()
            for state, times in states.items()
        }
