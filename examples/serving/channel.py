"""The examples' own request channel: a connection a request, a line of JSON in, lines of JSON back.

It stands for whatever an application speaks between its processes; aiokv has no part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Handler", "Message", "Replies", "Reply", "RequestFailed", "request", "serve"]

Message = dict[str, Any]
Reply = Callable[[Message], Awaitable[None]]
Handler = Callable[[Message, Reply], Coroutine[Any, Any, None]]

#: Longest line in bytes; a prompt of some hundred thousand tokens.
LIMIT = 1 << 20


class RequestFailed(Exception):
    """The other side said that it failed, or went away."""


class Replies:
    """What comes back for one request."""

    def __init__(self, reader: asyncio.StreamReader, address: str) -> None:
        self._reader = reader
        self._address = address

    async def next(self) -> Message:
        """The next line.

        Raises:
            RequestFailed: The line says that the request failed, or there is none.
        """
        line = await self._reader.readline()
        message: Message = json.loads(line) if line else {"error": "it hung up"}
        if "error" in message:
            raise RequestFailed(f"{self._address}: {message['error']}")
        return message


@asynccontextmanager
async def request(address: str, message: Message) -> AsyncIterator[Replies]:
    """Send ``message`` to ``host:port``. Leaving the context before the last reply calls it off.

    Raises:
        RequestFailed: Nobody can be reached there.
    """
    host, port = _split(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=LIMIT)
    except OSError as error:
        raise RequestFailed(f"{address}: {error}") from error
    try:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()
        yield Replies(reader, address)
    finally:
        await _close(writer)


@asynccontextmanager
async def serve(listen: str, handler: Handler) -> AsyncIterator[str]:
    """Answer requests at ``host:port`` until the context is left; gives the address that was bound.

    ``handler(message, reply)`` is a task of its own for each request. It is cancelled when the
    client hangs up, and an exception that it raises is told to the client.
    """
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_respond(handler, reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    host, port = _split(listen)
    server = await asyncio.start_server(connected, host, port, limit=LIMIT)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _respond(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def reply(message: Message) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    try:
        message = json.loads(await reader.readline())
        work = asyncio.create_task(handler(message, reply))
        # Nothing more comes from the client: what ends this is that it hangs up.
        gone = asyncio.create_task(reader.read())
        gone.add_done_callback(lambda _: work.cancel())
        try:
            await work
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
    except Exception as error:  # noqa: BLE001 - a request may fail in any way; the server lives on
        with contextlib.suppress(ConnectionError):
            await reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
