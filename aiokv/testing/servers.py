"""Servers without a model, for tests of a router: they register, answer at a pace, and misbehave when told.

    async with ScriptedServer(control, "prefill") as prefill, ScriptedServer(control, "decode"):
        prefill.mode = "hang"

Needs ``pip install 'aiokv[router]'``.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

from aiokv.errors import AiokvError
from aiokv.router.instance import IDENTITY_PATH, Instance
from aiokv.router.messages import Load, Role

__all__ = ["Mode", "ScriptedServer", "Seen"]

#: What a server does with the next requests: ``hang`` never answers, ``fail`` answers 500, ``refuse`` 400,
#: ``busy`` 429, ``cut`` ends the connection (a decode after two tokens), ``stop`` sends two tokens and no
#: more, ``linger`` all of a stream and doesn't end it, ``end`` ends a stream before its ``[DONE]``, ``error``
#: answers 200 and an error as the first event, ``nonsense`` what is no event.
Mode = Literal[
    "answer", "hang", "fail", "refuse", "busy", "cut", "stop", "linger", "end", "error", "nonsense"
]


@dataclass(slots=True)
class Seen:
    """A request as it came."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    raw: bytes = b""
    #: When it came (ns).
    came_at: int = field(default_factory=time.monotonic_ns)
    #: The router gave it up, or the connection; and when (ns), 0 while not.
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled_at: int = 0

    @property
    def transfer(self) -> tuple[str, int]:
        """Its id and attempt."""
        params = self.body["kv_transfer_params"]
        return params["transfer_id"], params["attempt"]


class ScriptedServer:
    """A server and its ``Instance``; an async context manager.

    Args:
        router: Control address of the router.
        role: ``prefill`` or ``decode``.
        tokens: Of an answer.
        pace: Seconds between them.
        interval: Seconds between reports.
        options: Passed on to ``Instance``.

    Attributes:
        mode: What it does with requests from now on.
        tokens: Of answers from now on.
        pace: Seconds between them.
        seen: Requests that came, oldest first.
        came: Set with each of them.
        instance: Its ``Instance``.
        http: Where it is.
    """

    instance: Instance

    def __init__(
        self,
        router: str,
        role: Role,
        *,
        tokens: int = 4,
        pace: float = 0.0,
        interval: float = 0.05,
        **options: Any,  # noqa: ANN401 (the instance's own)
    ) -> None:
        self._router, self._role = router, role
        self.tokens, self.pace, self._interval = tokens, pace, interval
        self._options = options
        self._stack = AsyncExitStack()
        self.mode: Mode = "answer"
        self.seen: list[Seen] = []
        self.came = asyncio.Event()
        self.http = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=64 << 20)
        application.add_routes(
            [
                web.get(IDENTITY_PATH, self._identify),
                web.post("/v1/completions", self._answer),
                web.post("/v1/chat/completions", self._answer),
            ]
        )
        async with AsyncExitStack() as stack:
            runner = web.AppRunner(
                application, handler_cancellation=True, access_log=None, shutdown_timeout=0.05
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            self.http = f"http://127.0.0.1:{runner.addresses[0][1]}"
            wanted: dict[str, Any] = {
                "role": self._role,
                "http": self.http,
                "models": ["scripted"],
                "fingerprint": "one",
                "engine": f"tcp://127.0.0.1:{runner.addresses[0][1]}",
                "interval": self._interval,
                "load": self._load,
            }
            self.instance = Instance(self._router, **{**wanted, **self._options})
            await stack.enter_async_context(self.instance)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _load(self) -> Load:
        return Load(running=self.instance.requests if hasattr(self, "instance") else 0)

    async def _identify(self, request: web.Request) -> web.Response:
        return web.json_response(self.instance.identity())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not self.instance.authorized(request.headers.get("Authorization")):
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        raw = await request.read()
        seen = Seen(request.path, json.loads(raw), dict(request.headers), raw)
        self.seen.append(seen)
        self.came.set()
        try:
            with self.instance.request(*seen.transfer):
                return await self._scripted(request, seen)
        except AiokvError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        except asyncio.CancelledError:
            seen.cancelled_at = time.monotonic_ns()
            seen.cancelled.set()
            raise

    async def _scripted(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        match self.mode:
            case "hang":
                await asyncio.Event().wait()
            case "fail" | "refuse" | "busy":
                status = {"fail": 500, "refuse": 400, "busy": 429}[self.mode]
                error = {"message": f"told to {self.mode}", "type": "invalid_request_error"}
                return web.json_response({"error": error}, status=status)
            case "cut" if self._role == "prefill" or not seen.body.get("stream"):
                if request.transport is not None:
                    request.transport.abort()
                await asyncio.Event().wait()
            case _:
                pass
        if self._role == "prefill" or not seen.body.get("stream"):
            count = 1 if self._role == "prefill" else self.tokens
            await asyncio.sleep(self.pace * (count - 1))
            return web.json_response(_whole(seen, count))
        return await self._streamed(request, seen)

    async def _streamed(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.mode in ("error", "nonsense"):
            said = (
                b'data: {"error": {"message": "told to"}}\n\n' if self.mode == "error" else b"x" * (2 << 20)
            )
            await response.write(said)
            return response
        for number in range(self.tokens):
            if number == 2 and self.mode not in ("answer", "linger"):
                break
            if number:
                await asyncio.sleep(self.pace)
            await response.write(b"data: " + json.dumps(_piece(seen, number)).encode() + b"\n\n")
        match self.mode:
            case "stop":
                await asyncio.Event().wait()
            case "cut":
                await response.write(b'data: {"half": ')
                if request.transport is not None:
                    request.transport.abort()
                await asyncio.Event().wait()
            case "end":
                return response
            case _:
                await response.write(b"data: [DONE]\n\n")
        if self.mode == "linger":
            await asyncio.Event().wait()
        return response


def _piece(seen: Seen, number: int) -> dict[str, Any]:
    chat = seen.path.endswith("chat/completions")
    text = f"t{number} "
    choice = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": seen.transfer[0],
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": seen.body["model"],
        "choices": [{"index": 0, "finish_reason": None, **choice}],
    }


def _whole(seen: Seen, tokens: int) -> dict[str, Any]:
    chat = seen.path.endswith("chat/completions")
    text = "".join(f"t{number} " for number in range(tokens))
    choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {
        "id": seen.transfer[0],
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": seen.body["model"],
        "choices": [{"index": 0, "finish_reason": "length", **choice}],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
    }
