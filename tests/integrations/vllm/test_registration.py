"""An instance makes itself known to aiokv's router; vLLM's own server is played by one path."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from aiokv.device.cache import KVCache
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.worker import WorkerHalf
from aiokv.proto.layout import CacheLayout

aiohttp = pytest.importorskip("aiohttp")
web = pytest.importorskip("aiohttp.web")
server = pytest.importorskip("aiokv.router.server")

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def health() -> AsyncIterator[str]:
    """Where a server says that it is well."""

    async def well(request: object) -> object:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", well)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}"
    await runner.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def worker(control: str, role: str, http: str, ranks: int = 1, **more: object) -> WorkerHalf:
    layout = CacheLayout.attention(
        layers=2, blocks=4, block_size=32, heads=2, head_size=8, dtype="float32", axes="bhtsd"
    )
    cache = KVCache.from_tensors(layout, [torch.zeros(4, 2, 32, 16) for _ in range(2)])
    told = {"address": control, "role": role, "http": http, "models": ["tiny"]}
    settings = ConnectorSettings.read({"transports": ["tcp"], "router": told, **more})
    try:
        return WorkerHalf(cache, settings, ranks=ranks)
    except ValueError:
        cache.close()
        raise


async def test_a_pair_makes_itself_known(health: str) -> None:
    from aiokv.router.server import Router

    async with (
        Router(http="127.0.0.1:0", control="tcp://127.0.0.1:0") as router,
        aiohttp.ClientSession() as client,
    ):

        async def models() -> list[str]:
            async with client.get(router.http + "/v1/models") as response:
                return [each["id"] for each in (await response.json())["data"]]

        halves = [
            await asyncio.to_thread(worker, router.control, role, health) for role in ("prefill", "decode")
        ]
        while await models() != ["tiny"]:  # noqa: ASYNC110 (over HTTP nobody tells)
            await asyncio.sleep(0.02)
        for half in halves:
            await asyncio.to_thread(half.close)
        while await models():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_ranks_are_known_by_the_first(health: str) -> None:
    """It knows where the others are, as their ports are in a row."""
    from aiokv.router.server import Router

    with pytest.raises(ValueError, match="needs a bind with a port"):
        await asyncio.to_thread(worker, "tcp://127.0.0.1:1", "prefill", health, ranks=2)
    async with Router(http="127.0.0.1:0", control="tcp://127.0.0.1:0") as router:
        port = free_port()
        bind = f"tcp://127.0.0.1:{port}"
        half = await asyncio.to_thread(worker, router.control, "prefill", health, ranks=2, bind=bind)
        while not router.registry.members:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        (member,) = router.registry.members.values()
        assert member.report.engines == (bind, f"tcp://127.0.0.1:{port + 1}")
        await asyncio.to_thread(half.close)
