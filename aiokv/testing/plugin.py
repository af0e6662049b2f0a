"""Fixtures for pytest: a connected pair, any number of engines, a network with faults, a mocked device.

Nobody gets them unasked. In the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["aiokv.testing.plugin"]

The async ones are pytest-asyncio's. What is drawn in a test comes from ``aiokv_seed``; a test that fails
prints what ``--aiokv-seed`` has to be to have it drawn again.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from aiokv.device.mocked import MockedDevice
    from aiokv.engine.engine import TransferEngine
    from aiokv.proto.layout import CacheLayout
    from aiokv.proto.settings import Settings
    from aiokv.testing.faultynetwork import FaultyNetwork
    from aiokv.testing.pairs import Engines

# aiokv is imported where it is used: loading the plugin costs nothing, and coverage sees all of it.

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--aiokv-seed``."""
    parser.addoption(
        "--aiokv-seed", type=int, help="for what aiokv.testing draws; a test that fails prints it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed where none was given."""
    given: int | None = config.getoption("--aiokv-seed", None)
    config.stash[_SEED] = random.SystemRandom().getrandbits(32) if given is None else given


@pytest.fixture
def aiokv_seed(request: pytest.FixtureRequest) -> int:
    """The test's own number, the same again with the same ``--aiokv-seed``, whatever runs before it."""
    seed = request.config.stash[_SEED]
    request.node.add_report_section("setup", "aiokv", f"to repeat what was drawn: --aiokv-seed {seed}")
    return zlib.crc32(request.node.nodeid.encode(), seed & 0xFFFFFFFF)


@pytest.fixture
def aiokv_layout() -> CacheLayout:
    """The layout of the pair's caches; override it for one of your own."""
    from aiokv.testing.tables import LAYOUT

    return LAYOUT


@pytest.fixture
def aiokv_settings() -> Settings | None:
    """Timers and bounds of the engines; override it for your own."""
    return None


@pytest.fixture
def aiokv_network(aiokv_seed: int) -> FaultyNetwork:
    """What joins the control channels of ``aiokv_engines``; faultless until it is told otherwise."""
    from aiokv.testing.faultynetwork import FaultyNetwork

    return FaultyNetwork(aiokv_seed)


@pytest.fixture
def aiokv_device(aiokv_seed: int) -> Iterator[MockedDevice]:
    """A device whose streams are stepped by hand, or in an order that is drawn.

    A test in which something was read or written that nothing orders fails in the end, unless it took those
    hazards out of ``device.hazards``.
    """
    from aiokv.device.mocked import MockedDevice

    device = MockedDevice(aiokv_seed)
    yield device
    if device.hazards:
        pytest.fail("\n".join(["accesses that nothing orders:", *map(str, device.hazards)]), pytrace=False)


@pytest_asyncio.fixture
async def aiokv_engines(
    aiokv_network: FaultyNetwork, aiokv_settings: Settings | None
) -> AsyncIterator[Engines]:
    """Makes engines, and closes them and their caches: ``engine = await aiokv_engines.add("a")``."""
    from aiokv.testing.pairs import Engines

    async with Engines(settings=aiokv_settings, network=aiokv_network) as engines:
        yield engines


@pytest_asyncio.fixture
async def aiokv_pair(
    aiokv_layout: CacheLayout, aiokv_settings: Settings | None
) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
    """Two engines that have met, joined by memory, with caches of ``aiokv_layout`` full of random bytes.

    A test that leaves something of a transfer behind fails in the end.
    """
    from aiokv.testing.pairs import connected_pair

    async with connected_pair(aiokv_layout, settings=aiokv_settings) as pair:
        yield pair
