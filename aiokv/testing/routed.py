"""A router and servers without a model, in one process, for tests.

    async with routed(prefills=2, decodes=2) as site:
        site.prefills[0].mode = "fail"
        status, answer = await site.post(stream=True)

Instances and router talk through memory; requests go over the loopback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp

from aiokv.control.memory import MemoryNetwork
from aiokv.router.messages import ROLES
from aiokv.router.server import Router
from aiokv.router.settings import RouterSettings
from aiokv.testing.servers import ScriptedServer

__all__ = ["Routed", "routed"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Routed:
    """What ``routed`` gives.

    Attributes:
        router: Entered.
        prefills: Servers that are up.
        decodes: Servers that are up.
        client: For requests.
        network: How router and instances talk.
    """

    router: Router
    prefills: list[ScriptedServer]
    decodes: list[ScriptedServer]
    client: aiohttp.ClientSession
    network: MemoryNetwork

    @property
    def servers(self) -> list[ScriptedServer]:
        """All of them."""
        return self.prefills + self.decodes

    async def post(
        self,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        **fields: Any,  # noqa: ANN401 (what JSON has)
    ) -> tuple[int, Any]:
        """Status and answer of a request with these fields; its events where it is a stream."""
        asked = {"model": "scripted", "prompt": "x", **fields}
        async with self.client.post(self.router.http + path, json=asked, headers=headers) as response:
            if response.content_type == "text/event-stream":
                return response.status, (await response.text()).strip().split("\n\n")
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON."""
        async with self.client.get(self.router.http + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def routed(
    prefills: int = 1,
    decodes: int = 1,
    *,
    settings: Mapping[str, Any] = _NOTHING,
    router: Mapping[str, Any] = _NOTHING,
    **options: Any,  # noqa: ANN401 (a server's)
) -> AsyncIterator[Routed]:
    """A router with so many servers of either role, all up.

    Args:
        prefills: How many prefill.
        decodes: How many decode.
        settings: Fields of ``RouterSettings``.
        router: More arguments of ``Router``.
        options: Arguments of every ``ScriptedServer``.
    """
    network = MemoryNetwork()
    made: dict[str, list[ScriptedServer]] = {role: [] for role in ROLES}
    async with AsyncExitStack() as stack:
        entered = await stack.enter_async_context(
            Router(
                http="127.0.0.1:0",
                channel=network.channel("memory://router"),
                settings=RouterSettings(**settings),
                **router,
            )
        )
        for role, count in zip(ROLES, (prefills, decodes), strict=True):
            for number in range(count):
                given = {"channel": network.channel(f"memory://{role}{number}"), "interval": 0.2, **options}
                server = ScriptedServer("memory://router", role, **given)
                made[role].append(await stack.enter_async_context(server))
                await server.instance.wait_up()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Routed(entered, made["prefill"], made["decode"], client, network)
