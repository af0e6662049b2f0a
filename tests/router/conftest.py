"""A router and servers without a model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="the router needs the extra: pip install 'aiokv[router]'")

from aiokv.testing.routed import Routed, routed


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Routed]:
    """One instance of each role."""
    async with routed() as made:
        yield made


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Routed]:
    """Two of each."""
    async with routed(2, 2) as made:
        yield made


@pytest_asyncio.fixture
async def no_threads_left() -> AsyncIterator[None]:
    """End the threads that files are read in."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()
