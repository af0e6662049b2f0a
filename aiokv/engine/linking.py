"""Choosing the data path to a producer: the best transport that works between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aiokv.errors import AiokvError, PeerLostError
from aiokv.transports.base import Link, PeerInfo, Transport

__all__ = ["open_link"]


async def open_link(
    transports: Sequence[Transport], offered: Mapping[str, bytes], peer: PeerInfo, within: float
) -> tuple[Transport, Link]:
    """Open a link by the first transport that both ends have and that proves itself.

    Args:
        transports: The transports that may be used here, best first.
        offered: What the producer said of its transports, by name.
        peer: The producer.
        within: Seconds that each attempt may take.

    Returns:
        The transport, and the link, which the caller closes.

    Raises:
        PeerLostError: None works; the message says for each why.
    """
    faults = []
    for transport in transports:
        if transport.name not in offered:
            faults.append(f"{transport.name}: not offered there")
            continue
        try:
            return transport, await _connect(transport, offered[transport.name], peer, within)
        except TimeoutError:
            faults.append(f"{transport.name}: no answer within {within:g} s")
        except (AiokvError, OSError) as error:
            faults.append(f"{transport.name}: {error}")
    unknown = sorted(set(offered) - {transport.name for transport in transports})
    if unknown:
        faults.append(f"not allowed here: {', '.join(unknown)}")
    raise PeerLostError(f"no data path to {peer.address}: {'; '.join(faults)}")


async def _connect(transport: Transport, description: bytes, peer: PeerInfo, within: float) -> Link:
    """Connect in time. Time in which this side stood still is not held against the producer."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + within
        try:
            async with asyncio.timeout_at(due):
                return await transport.connect(description, peer)
        except TimeoutError:
            if loop.time() < due + within / 3:
                raise
