"""``python -m aiokv router`` and servers as processes: signals, kills, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import aiokv
from aiokv import Keys
from aiokv.router.command import main

SERVER = """
import asyncio, sys, json
from aiokv import Keys
from aiokv.testing.servers import ScriptedServer
async def main(router, role, options):
    if keys := options.pop("keys", None):
        options |= {"keys": Keys.load(keys), "allow": Keys.listed(keys)}
    async with ScriptedServer(router, role, **options) as server:
        print(server.http, flush=True)
        await asyncio.Event().wait()
asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
"""


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    root = str(Path(aiokv.__file__).parents[1])
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env={**os.environ, "PYTHONPATH": root},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.communicate()


@asynccontextmanager
async def router(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """The program, its URL for clients, and its control address."""
    given = ("-m", "aiokv", "router", "--http=127.0.0.1:0", "--control=tcp://127.0.0.1:0", *options)
    async with process(*given) as started:
        assert started.stdout is not None
        clients, instances, _ = [(await started.stdout.readline()).decode().split()[1] for _ in range(3)]
        yield started, clients.removesuffix("/v1"), instances


@asynccontextmanager
async def server(
    control: str, role: str, **options: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    given = json.dumps({"interval": 0.2, **options})
    async with process("-c", SERVER, control, role, given) as started:
        assert started.stdout is not None
        yield started, (await started.stdout.readline()).decode().strip()


async def ready(client: aiohttp.ClientSession, url: str) -> None:
    """Until requests can be answered."""
    while True:
        async with client.get(url + "/readyz") as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.05)


async def ask(client: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any]:
    body = {"model": "scripted", "prompt": "x"}
    async with client.post(url + "/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_a_killed_server_gets_nothing_once_its_time_is_over() -> None:
    async with AsyncExitStack() as stack:
        _, url, control = await stack.enter_async_context(router())
        await stack.enter_async_context(server(control, "prefill"))
        dead, _ = await stack.enter_async_context(server(control, "decode"))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        await ready(client, url)
        assert (await ask(client, url))[0] == 200
        dead.send_signal(signal.SIGKILL)
        await dead.wait()
        # It can't be reached, so one request fails at most, before its time is over; and at once.
        statuses = [(await ask(client, url))[0] for _ in range(3)]
        assert statuses[0] in (502, 503) and statuses[1:] == [503, 503]
        feed: Any = None
        while feed is None or len(feed["instances"]) > 1:
            async with client.get(url + "/feed.json") as response:
                feed = await response.json()
            await asyncio.sleep(0.05)
        # Another one in its place is served from, also at a later time.
        await stack.enter_async_context(server(control, "decode"))
        await ready(client, url)
        assert (await ask(client, url))[0] == 200


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_a_router_that_is_restarted_knows_everybody_again() -> None:
    async with AsyncExitStack() as stack:
        async with router() as (first, url, control):
            await stack.enter_async_context(server(control, "prefill"))
            await stack.enter_async_context(server(control, "decode"))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            await ready(client, url)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        _, url, _ = await stack.enter_async_context(router(f"--control={control}"))
        await ready(client, url)
        assert (await ask(client, url))[0] == 200


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_sigterm_ends_it_well() -> None:
    async with router() as (started, url, _), aiohttp.ClientSession() as client:
        async with client.get(url + "/readyz") as response:
            assert response.status == 503
        started.send_signal(signal.SIGTERM)
        assert await started.wait() == 0


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_it_ends_with_its_parent() -> None:
    async with router("--with-parent") as (started, _, _):
        assert started.stdin is not None
        started.stdin.close()
        assert await started.wait() == 0


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.may_block("writes the keys")
async def test_keys_keep_strangers_out(tmp_path: Path) -> None:
    def made(name: str) -> Keys:
        keys = Keys.generate()
        keys.save(tmp_path / name)
        return keys

    known, ours, strange = made("known"), made("router"), made("strange")
    (tmp_path / "router" / "allowed").write_text(known.public)
    for name in ("known", "strange"):
        (tmp_path / name / "allowed").write_text(ours.public)
    secret = tmp_path / "api"
    secret.write_text("good # of the tests\n")
    async with AsyncExitStack() as stack:
        given = f"--keys={tmp_path / 'router'}", f"--api-keys={secret}"
        _, url, control = await stack.enter_async_context(router(*given))
        assert control.endswith(f"#{ours.public}")
        client = await stack.enter_async_context(aiohttp.ClientSession())
        strangers = {"keys": str(tmp_path / "strange"), "models": ["strange"]}
        for role in ("prefill", "decode"):
            await stack.enter_async_context(server(control, role, **strangers))
            await stack.enter_async_context(server(control, role, keys=str(tmp_path / "known")))
        await ready(client, url)
        key = {"Authorization": "Bearer good"}
        assert (await ask(client, url))[0] == 401
        assert (await ask(client, url, **key))[0] == 200
        async with client.get(url + "/v1/models", headers=key) as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["scripted"]
    assert strange.public != known.public


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--http", "0.0.0.0:8000"], "can be reached from other hosts"),
        (["--control", "tcp://0.0.0.0:7000", "--advertise", "tcp://10.0.0.1:7000"], "keys"),
        (["--http", "nowhere"], "is not host:port"),
        (["--body", "0"], "body"),
        (["--keys", "/nonexistent"], "No such file"),
    ],
)
def test_what_cannot_be_meant(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
