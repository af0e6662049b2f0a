"""A small transfer between two engines of this process, by each transport that needs no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiokv
from aiokv.doctor.findings import Finding, missing, ok

__all__ = ["trials"]

#: Seconds that one may take.
_PATIENCE = 20.0
_LAYOUT = aiokv.CacheLayout.attention(
    layers=2, blocks=4, block_size=16, heads=1, head_size=64, dtype="float16"
)


def trials() -> Iterator[Finding]:
    """Whether bytes arrive. ``cma`` is left out: a process may always read itself."""
    for name in ("tcp", "shm"):
        required = name == "tcp"
        try:
            asyncio.run(_moved(name))
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the table
            yield missing("transports", name, f"a transfer failed: {error!r}", required=required)
        else:
            yield ok("transports", name, "a transfer between two engines went well", required=required)


async def _moved(transport: str) -> None:
    with aiokv.KVCache.allocate(_LAYOUT) as there, aiokv.KVCache.allocate(_LAYOUT) as here:
        async with (
            asyncio.timeout(_PATIENCE),
            aiokv.TransferEngine(there, transports=[transport]) as producer,
            aiokv.TransferEngine(here, transports=[transport]) as consumer,
            consumer.fetch("doctor", [0], sources=[producer.address]) as fetched,
        ):
            async with producer.offer("doctor", [0]):
                pass
            await fetched.wait()
