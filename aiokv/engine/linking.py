"""Choosing the data path to a producer: the best transport that works between the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aiokv.errors import AiokvError, PeerLostError, Refused
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
        within: Seconds that each attempt may take; once the producer has answered, as many as the transport
            asks for.

    Returns:
        The transport, and the link, which the caller closes.

    Raises:
        Refused: They have none in common, or none that is allowed; the message says what each has.
        PeerLostError: Those that they have in common don't work now; the message says for each why.
    """
    faults, tried = [], False
    for transport in transports:
        if transport.name not in offered:
            faults.append(f"{transport.name}: not offered there")
            continue
        tried = True
        try:
            return transport, await _connect(transport, offered[transport.name], peer, within)
        except TimeoutError as error:
            faults.append(f"{transport.name}: {error}")
        except (AiokvError, OSError) as error:
            faults.append(f"{transport.name}: {error}")
    unknown = sorted(set(offered) - {transport.name for transport in transports})
    if unknown:
        faults.append(f"not allowed here: {', '.join(unknown)}")
    kind = PeerLostError if tried else Refused
    raise kind(f"no data path to {peer.address}: {'; '.join(faults)}")


async def _connect(transport: Transport, description: bytes, peer: PeerInfo, within: float) -> Link:
    """Connect in time. Time in which this side stood still is not held against the producer."""
    while True:
        still, too_long = _Standstill(within / 8), f"no answer within {within:g} s"
        try:
            async with asyncio.timeout(within) as limit:

                def answered(seconds: float, limit: asyncio.Timeout = limit) -> None:
                    nonlocal too_long
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    too_long = f"it answered, but there was no path within {seconds:g} s"

                return await transport.connect(description, replace(peer, answered=answered))
        except TimeoutError as error:
            if not still.seen:
                raise TimeoutError(too_long) from error
        finally:
            still.close()


class _Standstill:
    """Notices that the loop was held, or the process stopped, for longer than ``step`` seconds.

    It looks at each step: how late a time-out itself comes says little, since most of the time
    in which nothing ran may lie before it.
    """

    def __init__(self, step: float) -> None:
        self.seen = False
        self._loop = asyncio.get_running_loop()
        self._step = step
        self._timer = self._next()

    def _next(self) -> asyncio.TimerHandle:
        due = self._loop.time() + self._step
        return self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        self.seen = self.seen or self._loop.time() > due + self._step
        self._timer = self._next()

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()
