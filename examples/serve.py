"""A prefill or a decode server behind `python -m aiokv router`; several requests decode together.

    python -m aiokv router --http 127.0.0.1:8000 --control tcp://127.0.0.1:7000
    python examples/serve.py --role prefill --router tcp://127.0.0.1:7000     # as many as you like
    python examples/serve.py --role decode  --router tcp://127.0.0.1:7000
    curl -N localhost:8000/v1/chat/completions -d '{"model": "smollm2", "stream": true, "messages":
        [{"role": "user", "content": "What does a harbour pilot do?"}]}'

SIGTERM drains it: it takes nothing new, and ends when what it has is answered. On several hosts, --http,
--control and --bind have to name addresses that the others reach, and --keys says who they are;
docs/howto/router.md shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

import aiokv
from aiokv.router.instance import IDENTITY_PATH, Instance
from aiokv.router.messages import Load
from serving.answer import Answer, Text
from serving.batch import Batcher, Decoding, step
from serving.compute import Compute
from serving.model import Model
from serving.options import address, arguments, count, seconds, start, tell_parent
from serving.paged import BlockPool, PagedCache
from serving.wanted import Refused, Wanted, read


class Server:
    """Answers requests by one role; ``instance`` is set once it is known where this server is."""

    instance: Instance

    def __init__(self, model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> None:
        self._model = model
        self._engine = engine
        self._options = options
        self._block_size: int = options.block_size
        self.context: int = options.blocks * options.block_size
        self._pool = BlockPool(options.blocks)
        self._compute = Compute()
        forward = functools.partial(step, model, engine.cache)
        self._batcher = Batcher(self._compute, forward, options.batch)

    @property
    def fingerprint(self) -> str:
        """What the KV of two servers must have in common."""
        layout = repr(self._model.layout(1, self._block_size)).encode()
        return hashlib.sha256(layout).hexdigest()[:32]

    def load(self) -> Load:
        """What there is to do."""
        found = self._engine.statistics()
        decoding = self._batcher.size
        return Load(
            running=decoding if self._options.role == "decode" else min(1, self.instance.requests),
            waiting=max(0, self.instance.requests - max(1, decoding)),
            blocks_free=self._pool.free,
            blocks=self._options.blocks,
            bytes_moved=found.bytes_received + found.bytes_sent,
            loop_lag=found.loop_lag_max,
            wakeup_lag=found.completion.wakeup_lag_max_ns / 1e9,
        )

    async def identify(self, request: web.Request) -> web.Response:
        """That whoever is at this address is the one that registered."""
        return web.json_response(self.instance.identity())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """One request, from the router alone."""
        if not self.instance.authorized(request.headers.get("Authorization")):
            return failed(401, "requests come by the router")
        chat = request.path.endswith("/chat/completions")
        try:
            body = await request.json()
            wanted = read(
                body,
                chat=chat,
                tokenizer=self._model.tokenizer,
                context=self.context,
                vocabulary=self._model.vocabulary,
            )
        except Refused as why:
            return failed(400, str(why), why.param)
        except ValueError as error:
            return failed(400, f"malformed JSON: {error}")
        try:
            with self.instance.request(wanted.transfer, wanted.attempt):
                if self._options.role == "prefill":
                    return await self._prefill(body, wanted, chat=chat)
                return await self._decode(request, body, wanted, chat=chat)
        except (aiokv.AiokvError, TimeoutError) as error:
            return failed(503, str(error) or "the deadline is over")

    async def _prefill(self, body: dict[str, str], wanted: Wanted, *, chat: bool) -> web.Response:
        """Compute the prompt, and let its KV be fetched layer by layer meanwhile."""
        tokens = wanted.tokens
        async with (
            asyncio.timeout(wanted.deadline),
            self._pool.take(self._blocks_for(len(tokens))) as blocks,
            self._engine.offer(
                wanted.transfer,
                blocks,
                tokens=len(tokens),
                attempt=wanted.attempt,
                deadline=wanted.deadline,
            ) as transfer,
        ):
            cache = PagedCache(self._engine.cache, blocks, on_layer=transfer.layer_ready)
            first = await self._compute.run(self._model.next_token, tokens, cache)
        answer = Answer(wanted.transfer, body["model"], chat=chat, prompt=len(tokens))
        return web.json_response(answer.whole(self._model.tokenizer.decode([first]), "length", 1))

    async def _decode(
        self, request: web.Request, body: dict[str, str], wanted: Wanted, *, chat: bool
    ) -> web.StreamResponse:
        answer = Answer(wanted.transfer, body["model"], chat=chat, prompt=len(wanted.tokens))
        text, tokens, reason = Text(self._model.tokenizer, wanted.stop), 0, "length"
        response: web.StreamResponse | None = None
        try:
            async with self._generated(wanted) as generated:
                async for token in generated:
                    tokens += 1
                    ended = token == self._model.tokenizer.eos
                    last = ended or tokens == wanted.limit
                    piece = text.add(token, last=last)
                    if wanted.stream:
                        response = response or await _streaming(request)
                        if piece or tokens == 1:
                            await response.write(answer.piece(piece))
                    if ended or text.ended:
                        reason = "stop"
                    if last or text.ended:
                        break
        except (aiokv.AiokvError, TimeoutError) as error:
            if response is None:
                raise
            await response.write(b"data: " + json.dumps(fault(503, str(error))).encode() + b"\n\n")
            return response
        if response is None:
            return web.json_response(answer.whole(text.whole, reason, tokens))
        await response.write(answer.piece("", reason))
        if wanted.usage:
            await response.write(answer.usage(tokens))
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def _generated(self, wanted: Wanted) -> AsyncIterator[AsyncIterator[int]]:
        """Fetch the prompt's KV, and decode from there with whoever else decodes."""
        prompt = len(wanted.tokens)
        async with (
            asyncio.timeout(wanted.deadline),
            self._pool.take(self._blocks_for(prompt + wanted.limit)) as blocks,
        ):
            async with self._engine.fetch(
                wanted.transfer,
                blocks[: self._blocks_for(prompt)],
                sources=list(wanted.sources),
                tokens=prompt,
                attempt=wanted.attempt,
                deadline=wanted.deadline,
            ) as transfer:
                await transfer.wait()
            # The last token of the prompt once more, for what follows it; its KV is written as it was.
            sequence = Decoding(blocks, prompt - 1, wanted.tokens[-1], wanted.limit)
            async with self._batcher.decoding(sequence) as tokens:
                yield tokens

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


async def _streaming(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def fault(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def failed(status: int, message: str, param: str | None = None) -> web.Response:
    """An error as an answer."""
    return web.json_response(fault(status, message, param), status=status)


@asynccontextmanager
async def listening(server: Server, where: str) -> AsyncIterator[str]:
    """Serve HTTP at ``host:port``; gives the URL."""
    application = web.Application(client_max_size=16 << 20)
    application.add_routes(
        [
            web.get(IDENTITY_PATH, server.identify),
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.completions),
        ]
    )
    # A request whose connection goes away is one that nobody wants any more.
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    host, _, port = where.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def main(model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> int:
    server = Server(model, engine, options)
    keys = await asyncio.to_thread(aiokv.Keys.load, options.keys) if options.keys else None
    allow = await asyncio.to_thread(aiokv.Keys.listed, options.keys) if options.keys else None
    async with engine, listening(server, options.http) as url:
        server.instance = Instance(
            options.router,
            role=options.role,
            http=url,
            models=[options.name or model.name],
            fingerprint=server.fingerprint,
            engine=engine.address,
            context=server.context,
            load=server.load,
            interval=options.interval,
            bind=options.control,
            keys=keys,
            allow=allow,
            insecure=options.insecure,
        )
        async with server.instance as instance:
            drain = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.set)
            tell_parent(http=url, engine=engine.address)
            await drain.wait()
            instance.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.grace):
                    await instance.wait_idle()
    return 0


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = arguments(__doc__)
    option = parser.add_argument
    option("--role", choices=("prefill", "decode"), required=True, help="what this server does")
    option("--router", required=True, metavar="ADDRESS", help="control address of the router")
    option(
        "--http",
        type=address,
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the router reaches this server; port 0 takes a free one (default: %(default)s)",
    )
    option(
        "--control",
        default="tcp://127.0.0.1:0",
        metavar="ADDRESS",
        help="where the router's words arrive (default: %(default)s)",
    )
    option("--name", help="what requests call the model (default: the name given to --model)")
    option("--batch", type=count, default=8, help="requests that decode together (default: %(default)s)")
    option("--interval", type=seconds, default=1.0, help="seconds between reports (default: %(default)g)")
    option("--grace", type=seconds, default=30.0, help="seconds to finish at SIGTERM (default: %(default)g)")
    return parser.parse_args(line)


if __name__ == "__main__":
    sys.exit(start(main, parsed()))
