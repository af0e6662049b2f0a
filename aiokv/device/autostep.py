"""Lets a mocked device step itself at random times, for simulations."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Protocol

__all__ = ["Autostep", "Stepped"]


class Stepped(Protocol):
    """What is stepped: a mocked device."""

    @property
    def steppable(self) -> bool:
        """Whether there is a step to take, or may be one without anybody telling."""

    def step(self) -> bool:
        """Take one step; False if there is none to take."""


class Autostep:
    """Steps a device while there is something to step, and is not on the loop otherwise.

    ``kick`` may be called from any thread, all else only from the loop's.
    """

    __slots__ = ("_closed", "_device", "_handle", "_loop", "_mean_s", "_random", "_thread")

    def __init__(
        self, device: Stepped, loop: asyncio.AbstractEventLoop, rng: random.Random, mean_s: float
    ) -> None:
        self._device = device
        self._loop = loop
        self._random = rng
        self._mean_s = mean_s
        self._thread = threading.get_ident()
        #: The next step; None when none is scheduled.
        self._handle: asyncio.TimerHandle | None = None
        self._closed = False
        self.kick()

    def kick(self) -> None:
        """There may be a step to take."""
        if self._closed:
            return
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self.kick)
        elif self._handle is None and self._device.steppable:
            self._handle = self._loop.call_later(self._random.expovariate(1 / self._mean_s), self._step)

    def close(self) -> None:
        """Take no more steps. May be called twice."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _step(self) -> None:
        self._handle = None
        self._device.step()
        self.kick()
