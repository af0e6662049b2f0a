"""The other engine of a pair: a process with a cache, which offers what it is told to."""

from __future__ import annotations

import asyncio
import cProfile
import time
from contextlib import AsyncExitStack, closing
from typing import Any

import aiokv
from aiokv.bench.channels import CHANNELS
from aiokv.bench.child import Line
from aiokv.bench.usage import holdings, resident_bytes, used_cpu_ns, used_cpu_of_loop_ns

__all__ = ["FUNCTION", "Awake", "Partner", "layout", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.partner:serve"


def layout(blocks: int, layers: int = 1) -> aiokv.CacheLayout:
    """A cache whose blocks take 64 KiB a layer, 32 KiB in K and 32 KiB in V."""
    return aiokv.CacheLayout.attention(
        layers=layers, blocks=blocks, block_size=16, heads=8, head_size=128, dtype="bfloat16", model=b"bench"
    )


async def serve(
    line: Line,
    *,
    blocks: int,
    layers: int,
    transports: list[str],
    channel: str = "zmq",
    settings: dict[str, int] | None = None,
) -> None:
    """Answer each command with what it gives; see the methods of ``Partner``."""
    cache = await asyncio.to_thread(aiokv.KVCache.allocate, layout(blocks, layers))
    with closing(cache):
        async with aiokv.TransferEngine(
            cache,
            transports=transports,
            channel=CHANNELS[channel](),
            settings=aiokv.Settings(**(settings or {})),
        ) as engine:
            partner = Partner(engine)
            line.say(address=engine.address)
            async for told in line:
                do = told.pop("do")
                line.say(**(await getattr(partner, do)(**told)))


class Awake:
    """Keeps a loop from sleeping, to tell what work costs from what falling asleep and waking does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._on = False

    def set(self, on: bool) -> None:
        """Keep it awake from now on, or no more."""
        if on and not self._on:
            self._loop.call_soon(self._again)
        self._on = on

    def _again(self) -> None:
        if self._on:
            self._loop.call_soon(self._again)


class Partner:
    """Offers by an engine, and what is known of its process.

    Args:
        engine: Entered.
    """

    def __init__(self, engine: aiokv.TransferEngine) -> None:
        self._engine = engine
        self._offers = AsyncExitStack()
        self._profile: cProfile.Profile | None = None
        self.awake = Awake(asyncio.get_running_loop())

    async def offer(self, tids: list[str], blocks: list[list[int]]) -> dict[str, Any]:
        """Offer some blocks under each id, all written."""
        for tid, listed in zip(tids, blocks, strict=True):
            offer = self._engine.offer(tid, listed, deadline=600)
            await self._offers.enter_async_context(offer)
            for layer in range(self._engine.cache.layout.layers):
                offer.layer_ready(layer)
        await asyncio.sleep(0)
        return {}

    async def finish(self) -> dict[str, Any]:
        """Wait until all that was offered is fetched."""
        await self._offers.aclose()
        return {}

    async def sequence(self, prefix: str, count: int, blocks: list[int]) -> dict[str, Any]:
        """Offer one after another, the next when the one before was fetched."""
        for number in range(count):
            async with self._engine.offer(f"{prefix}{number}", blocks, deadline=600):
                pass
        return {}

    async def keep_awake(self, on: bool) -> dict[str, Any]:
        """Whether this process's loop may sleep where nothing is to be done."""
        self.awake.set(on)
        return {}

    async def usage(self) -> dict[str, Any]:
        """What this process used and holds."""
        return {
            "cpu_ns": used_cpu_ns(),
            "loop_ns": used_cpu_of_loop_ns(),
            "rss": resident_bytes(),
            "held": holdings(self._engine),
        }

    async def profile(self, file: str = "") -> dict[str, Any]:
        """Begin to profile; with a file, end and write there."""
        if not file:
            self._profile = cProfile.Profile(time.thread_time)
            self._profile.enable()
        elif self._profile is not None:
            self._profile.disable()
            self._profile.dump_stats(file)
        return {}
