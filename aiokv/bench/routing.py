"""A router and scripted servers as processes of their own, and a client that costs little."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from aiokv.bench.child import Line
from aiokv.bench.usage import resident_bytes, used_cpu_ns
from aiokv.router.messages import Role
from aiokv.router.server import Router
from aiokv.router.settings import RouterSettings
from aiokv.testing.servers import ScriptedServer

__all__ = ["ROUTER", "SERVER", "Stream", "asked", "route", "serve"]

#: For ``aiokv.bench.child.child``.
ROUTER = "aiokv.bench.routing:route"
SERVER = "aiokv.bench.routing:serve"


async def route(line: Line) -> None:
    """A router; answers each command with what its process uses."""
    settings = RouterSettings(concurrency=4096, queue=4096)
    async with Router(http="127.0.0.1:0", control="tcp://127.0.0.1:0", settings=settings) as router:
        gc.freeze()  # as the program does
        line.say(http=router.http, control=router.control)
        async for _ in line:
            up = [each.role for each in router.registry.members.values() if each.verified]
            line.say(resident=resident_bytes(), cpu=used_cpu_ns(), up=sorted(up))


async def serve(line: Line, *, router: str, role: Role, tokens: int, pace: float, interval: float) -> None:
    """A scripted server; answers each command with when requests came and were given up (ns)."""
    async with ScriptedServer(router, role, tokens=tokens, pace=pace, interval=interval) as server:
        line.say(http=server.http, token=server.instance.token)
        async for told in line:
            if told["do"] == "become":
                server.tokens, server.pace, server.mode = told["tokens"], told["pace"], told["mode"]
            seen = {each.body["user"]: (each.came_at, each.cancelled_at) for each in server.seen}
            server.seen.clear()
            line.say(seen=seen, cpu=used_cpu_ns())


def asked(name: str, *, stream: bool, transfer: bool) -> bytes:
    """A chat's body of about a kilobyte.

    Args:
        name: Of the request, by which a server tells when it came.
        stream: Whether it is answered in pieces.
        transfer: As the router would send it on.
    """
    words = "Tell me about the harbour, its pilots, the tides and the ships that wait outside. " * 10
    body: dict[str, Any] = {
        "model": "scripted",
        "messages": [{"role": "system", "content": words}, {"role": "user", "content": name}],
        "stream": stream,
        "user": name,
        "max_tokens": 64,
    }
    if transfer:
        body["kv_transfer_params"] = {"transfer_id": name, "attempt": 0}
    return json.dumps(body).encode()


class Stream(asyncio.Protocol):
    """One request on a connection of its own.

    Args:
        body: What is asked.
        headers: Beside those that every request has.
        on_token: Called for each piece that came, with the number of events in it.

    Attributes:
        first: From the request to its first event (s); 0 while there is none.
        over: Resolves at the end of the answer, with whether it is whole.
    """

    def __init__(
        self, body: bytes, headers: Mapping[str, str], on_token: Callable[[int], None] | None = None
    ) -> None:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        )
        self._request = head.encode() + body
        self._on_token = on_token
        self._began = 0.0
        self._whole = False
        self.first = 0.0
        self.over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None  # None before it is connected

    @classmethod
    async def open(cls, url: str, body: bytes, headers: Mapping[str, str], **more: Any) -> Stream:  # noqa: ANN401
        """Connect, and send the request."""
        where = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: cls(body, headers, **more), where.hostname or "", where.port or 0
        )
        return stream

    def abort(self) -> None:
        """Go away."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass of it
        self._began = time.monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the first event, and the last."""
        events = data.count(b"data: ")
        if events:
            self.first = self.first or time.monotonic() - self._began
            if self._on_token is not None:
                self._on_token(events)
        self._whole = self._whole or b"[DONE]" in data or b'"usage"' in data

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if not self.over.done():
            self.over.set_result(self._whole)
