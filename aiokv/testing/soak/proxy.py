"""A TCP proxy whose connections can be cut and stalled."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from types import TracebackType
from typing import Self

__all__ = ["Proxy"]

_AT_ONCE = 1 << 18
#: Closing with this set sends a reset, as a firewall does that lost its tables.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens at a port of its own while it is entered, and leads to whoever is behind it now.

    Attributes:
        port: Where it listens; 0 before.
        behind: Port that connections are led to; 0 while nobody is there.
    """

    def __init__(self) -> None:
        self.behind = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        #: Both ends of each connection.
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.go_on()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, chance: random.Random | None = None) -> int:
        """Cut connections, with a reset: all, or some where ``chance`` is given. Gives how many."""
        cut = [pair for pair in self._pairs if chance is None or chance.random() < 0.5]
        for pair in cut:
            for writer in pair:
                with contextlib.suppress(OSError):
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
        return len(cut)

    def stall(self) -> None:
        """Carry nothing; connections stay."""
        self._open.clear()

    def go_on(self) -> None:
        """Carry again."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._lead(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self.behind)
        pair = (writer, back)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, back))
                group.create_task(self._carry(there, writer))
        except ExceptionGroup:  # cut, or one of the two is gone
            pass
        finally:
            self._pairs.discard(pair)
            back.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_AT_ONCE):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()
