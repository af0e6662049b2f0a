"""Waiting that is not cut short: what is given up is waited for all the same, until it is over."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["until_over"]


async def until_over(waited: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until something is over, also when this is cancelled meanwhile, which it then gives."""
    cancelled: asyncio.CancelledError | None = None
    while not waited.done():
        try:
            await asyncio.wait([waited])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled
