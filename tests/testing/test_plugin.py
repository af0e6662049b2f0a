"""The fixtures for pytest: here at work, and in a run of their own in which tests fail."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, transfer

pytest_plugins = ["aiokv.testing.plugin"]

LATENT = CacheLayout.latent(layers=2, blocks=8, block_size=4, latent_size=6, dtype="uint8")


@pytest.mark.asyncio
async def test_a_pair_is_there(aiokv_pair) -> None:
    producer, consumer = aiokv_pair
    assert producer.cache.layout == LAYOUT
    await transfer(producer, consumer, "t")


class TestOfItsOwn:
    @pytest.fixture
    def aiokv_layout(self) -> CacheLayout:
        return LATENT

    @pytest.fixture
    def aiokv_settings(self) -> Settings:
        return Settings(tombstones=77)

    @pytest.mark.asyncio
    async def test_layout_and_settings_can_be_overridden(self, aiokv_pair, aiokv_engines) -> None:
        producer, consumer = aiokv_pair
        assert consumer.cache.layout == LATENT
        await transfer(producer, consumer, "t")
        assert aiokv_engines.settings.tombstones == 77


@pytest.mark.asyncio
async def test_engines_are_joined_by_a_network_with_faults(aiokv_engines, aiokv_network) -> None:
    a, b = await aiokv_engines.add("a"), await aiokv_engines.add("b")
    aiokv_network.script(b.address, a.address, "drop")
    await transfer(a, b, "t")
    assert "drop" in {event.what for event in aiokv_network.trace}


@pytest.mark.asyncio
async def test_a_device_is_stepped_by_hand(aiokv_engines, aiokv_device) -> None:
    a, b = await aiokv_engines.add("a"), await aiokv_engines.add("b", device=aiokv_device)
    moving = asyncio.ensure_future(transfer(a, b, "t"))
    while not moving.done():
        await asyncio.sleep(0)
        aiokv_device.run()
    await moving


def test_a_seed_is_the_tests_own(aiokv_seed: int, aiokv_device) -> None:
    assert aiokv_device.seed == aiokv_seed


FAILING = """
import numpy as np
import pytest

def test_drawn(aiokv_seed):
    assert aiokv_seed is None

def test_hazards(aiokv_device):
    buffer = aiokv_device.allocate(8)
    for _ in range(2):
        aiokv_device.stream().write(buffer, 0, b"x")
    aiokv_device.run()

@pytest.mark.asyncio
async def test_leaves_something(aiokv_pair):
    aiokv_pair[0].offer("forgotten", [1]).start()

def test_good(aiokv_seed):
    pass
"""


def pytest_of(folder: Path, *arguments: str) -> str:
    """What a run of pytest of its own says, without the settings of this one."""
    options = ["-q", "--timeout=60", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", *options, *arguments, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False).stdout


@pytest.mark.timeout(240)
def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["aiokv.testing.plugin"]\n')
    (tmp_path / "test_failing.py").write_text(FAILING)
    said = pytest_of(tmp_path, "--aiokv-seed", "7")
    assert said.count("to repeat what was drawn: --aiokv-seed 7") >= 2, said
    assert "accesses that nothing orders:" in said
    assert "memory://a: offers is 1" in said
    assert re.search(r"1 failed, 3 passed, 2 errors", said), said
    own = zlib.crc32(b"test_failing.py::test_drawn", 7)
    assert f"assert {own} is None" in said


# -- the page in the docs ---------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.timeout(240)
def test_the_code_in_the_docs_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```python")
    for name, code in blocks:
        (tmp_path / name).write_text(code, encoding="utf-8")
    said = pytest_of(tmp_path)
    tests = sum(len(re.findall(r"^(?:async )?def test_", code, re.MULTILINE)) for _, code in blocks)
    passed = re.search(r"^(\d+) passed in", said, re.MULTILINE)
    assert passed, said
    assert int(passed[1]) >= tests
