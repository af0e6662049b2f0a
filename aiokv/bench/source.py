"""The process that transfers come from: one buffer, an engine for each transport, and the raw senders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import numpy as np

import aiokv
from aiokv.bench.child import Line
from aiokv.bench.figures import quantile
from aiokv.bench.lag import Ticker
from aiokv.bench.partner import Partner, layout
from aiokv.bench.raw import RawSender
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.proto.placement import Placement
from aiokv.transports.base import Transport

__all__ = ["BLOCK", "FUNCTION", "LAYERS", "engine_on", "fill", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.source:serve"

#: Bytes of a block in one layer: 32 KiB of K and 32 KiB of V.
BLOCK = 64 << 10
#: Layers of the caches that a buffer is taken for: one for small transfers, some for those of a whole prompt.
LAYERS = (1, 16)


@asynccontextmanager
async def engine_on(
    buffer: HostBuffer, layers: int, transport: str | Transport
) -> AsyncIterator[aiokv.TransferEngine]:
    """An engine whose cache is all of a buffer, which stays the caller's."""
    shape = layout(buffer.nbytes // (BLOCK * layers), layers)
    cache = aiokv.KVCache(shape, Placement.dense(shape), HostDevice(), (buffer,))
    async with aiokv.TransferEngine(cache, transports=[transport]) as engine:
        yield engine


def fill(buffer: HostBuffer) -> None:
    """Write numbers from 0 on, so that what arrives can be looked at."""
    words = np.frombuffer(buffer.view, np.int64)
    step = 1 << 20
    for first in range(0, len(words), step):
        words[first : first + step] = np.arange(first, min(first + step, len(words)))


async def serve(line: Line, *, nbytes: int, streams: int, transports: list[str]) -> None:
    """Answer each command with what it gives.

    ``engine`` in a command says which engine it is for: what it tells is that of ``Partner``.
    """
    buffer = await asyncio.to_thread(HostBuffer.allocate, nbytes)
    await asyncio.to_thread(fill, buffer)
    with closing(buffer):
        async with AsyncExitStack() as stack:
            partners, addresses = {}, {}
            for transport in transports:
                for layers in LAYERS:
                    engine = await stack.enter_async_context(engine_on(buffer, layers, transport))
                    name = f"{transport}{layers}"
                    partners[name], addresses[name] = Partner(engine), engine.address
            sender = RawSender(buffer.view, streams)
            line.say(addresses=addresses, port=sender.port, pid=os.getpid(), address=buffer.address)
            ticker = Ticker()
            async for told in line:
                do, name = told.pop("do"), told.pop("engine", "")
                if name:
                    line.say(**(await getattr(partners[name], do)(**told)))
                else:
                    line.say(**_lag(ticker, do))


def _lag(ticker: Ticker, do: str) -> dict[str, Any]:
    if do == "watch":
        ticker.start()
        return {}
    return {"p99_ms": quantile(ticker.stop(), 0.99) / 1e6}
