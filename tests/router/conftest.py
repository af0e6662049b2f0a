"""A router and servers without a model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="the router needs the extra: pip install 'aiokv[router]'")

import aiohttp

from aiokv.control.memory import MemoryNetwork
from aiokv.router.server import Router
from aiokv.router.settings import RouterSettings
from aiokv.testing.servers import ScriptedServer

ASKED = {"model": "scripted", "prompt": "x"}


@dataclass
class Site:
    """A router, its servers, and a client."""

    router: Router
    prefills: list[ScriptedServer]
    decodes: list[ScriptedServer]
    client: aiohttp.ClientSession
    network: MemoryNetwork

    async def post(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, Any]:
        """Status and answer; events where it is a stream."""
        url = self.router.http + path
        async with self.client.post(url, json={**ASKED, **fields}, headers=headers) as response:
            if response.content_type == "text/event-stream":
                return response.status, (await response.text()).strip().split("\n\n")
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.router.http + path) as response:
            return response.status, await response.json()

    @property
    def servers(self) -> list[ScriptedServer]:
        return self.prefills + self.decodes


Made = Callable[..., AbstractAsyncContextManager[Site]]


@asynccontextmanager
async def site(
    prefills: int = 1,
    decodes: int = 1,
    *,
    settings: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    network = MemoryNetwork()
    made: dict[str, list[ScriptedServer]] = {"prefill": [], "decode": []}
    async with AsyncExitStack() as stack:
        entered = await stack.enter_async_context(
            Router(
                http="127.0.0.1:0",
                channel=network.channel("memory://router"),
                settings=RouterSettings(**(settings or {})),
                **(router or {}),
            )
        )
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for number in range(count):
                server = ScriptedServer(
                    "memory://router",
                    role,  # type: ignore[arg-type]
                    **{"channel": network.channel(f"memory://{role}{number}"), "interval": 0.2, **options},
                )
                made[role].append(await stack.enter_async_context(server))
                await server.instance.wait_up()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(entered, made["prefill"], made["decode"], client, network)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Site]:
    """One instance of each role."""
    async with site() as made:
        yield made


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Site]:
    """Two of each."""
    async with site(2, 2) as made:
        yield made


@pytest.fixture
def make() -> Made:
    return site
