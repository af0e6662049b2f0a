"""Two processes of another library, a source and a reader; those that spin are stopped in between.

Some libraries take a core, in a thread or a coroutine of their own, when nothing is to be done. While aiokv
is measured, and while another of them is, that core would be missing.
"""

from __future__ import annotations

import importlib.util
import math
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiokv.bench.child import Child, ChildFailed, child
from aiokv.bench.moves import Work

__all__ = ["LARGEST", "LIBRARIES", "Library", "Pair", "joined"]

#: Their buffers are so large, in bytes: several of them are there at the same time.
LARGEST = 256 << 20


@dataclass(frozen=True, slots=True)
class Library:
    """One of them, in one of its configurations."""

    name: str
    #: Module of this package with its program: ``serve`` and ``read``.
    program: str
    #: What has to be installed, as it is imported.
    needs: str
    #: Whether it can move scattered fragments as one transfer.
    scatters: bool
    #: Whether it takes a core when nothing is to be done.
    spins: bool
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def installed(self) -> bool:
        """Whether it is there."""
        return importlib.util.find_spec(self.needs) is not None


_TCP = {"UCX_TLS": "tcp"}
LIBRARIES = (
    Library("NIXL", "nixl", "nixl", scatters=True, spins=True),
    Library("NIXL, tcp", "nixl", "nixl", scatters=True, spins=True, environment=_TCP),
    Library("UCXX", "ucxx", "ucxx", scatters=False, spins=True),
    Library("UCXX, tcp", "ucxx", "ucxx", scatters=False, spins=True, environment=_TCP),
    Library("Mooncake, tcp", "mooncake", "mooncake", scatters=True, spins=False),
)


class Pair:
    """Both processes; made by ``joined``."""

    def __init__(self, library: Library, source: Child, reader: Child) -> None:
        self.library = library
        self._both = (source, reader)
        self._reader = reader
        self._ended = False

    def can(self, work: Work) -> bool:
        """Whether it is to be measured with this."""
        fits = work.nbytes * work.at_once <= LARGEST
        return fits and (self.library.scatters or not work.paged)

    async def move(self, work: Work) -> float:
        """Do it, and give the rate in bytes a second; not a number if it can't, now or any more."""
        if self._ended:
            return math.nan
        self.go_on()
        try:
            done = await self._reader.ask(
                "move", nbytes=work.nbytes, paged=work.paged, at_once=work.at_once, times=work.times
            )
        except ChildFailed:
            self._ended = True
            return math.nan
        finally:
            self.stop()
        return work.total / float(done["ns"]) * 1e9

    def stop(self) -> None:
        """Let neither run, if it would without anything to do."""
        for process in self._both if self.library.spins else ():
            process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let both run."""
        for process in self._both:
            process.signal(signal.SIGCONT)


@asynccontextmanager
async def joined(library: Library) -> AsyncIterator[Pair]:
    """Both processes of a library, connected and stopped.

    Raises:
        ChildFailed: It doesn't work here.
    """
    module = f"aiokv.bench.peers.{library.program}"
    async with AsyncExitStack() as stack:
        source, reader = [
            await stack.enter_async_context(
                child(f"{module}:{function}", environment=library.environment, nbytes=LARGEST)
            )
            for function in ("serve", "read")
        ]
        await reader.ask("connect", **(await source.heard()))
        pair = Pair(library, source, reader)
        pair.stop()
        yield pair
