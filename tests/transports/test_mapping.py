from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from aiokv.device.offloop import off_loop
from aiokv.transports.mapping import Mapping


@pytest.fixture
def fd():
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.truncate(fd, 1 << 20)
    os.pwrite(fd, b"there", 4096)
    yield fd
    os.close(fd)


def mapped() -> bool:
    return "/memfd:test" in Path("/proc/self/maps").read_text()


@pytest.mark.asyncio
@pytest.mark.parametrize("populate", [True, False])
async def test_shows_the_memory_until_closed(fd: int, populate: bool) -> None:
    mapping = Mapping(fd, 1 << 20)
    if populate:
        await mapping.populate()
    assert bytes(mapping.buffer.view[4096:4101]) == b"there"
    assert mapping.buffer.view.readonly
    os.pwrite(fd, b"later", 4096)
    assert bytes(mapping.buffer.view[4096:4101]) == b"later"
    assert mapped()
    await mapping.close()
    assert not mapped()


@pytest.mark.asyncio
async def test_closed_while_pages_are_made_present(fd: int) -> None:
    mapping = Mapping(fd, 1 << 20)
    populating = mapping.populate()
    await mapping.close()
    await populating
    assert not mapped()


@pytest.mark.asyncio
async def test_a_view_that_is_held_stays_good(fd: int) -> None:
    mapping = Mapping(fd, 1 << 20)
    view = np.frombuffer(mapping.buffer.view, np.uint8)
    await mapping.close()
    assert bytes(view[4096:4101]) == b"there"
    del view, mapping
    assert not mapped()


@pytest.mark.asyncio
async def test_more_than_there_is(fd: int) -> None:
    with pytest.raises(ValueError):
        Mapping(fd, 2 << 20)


@pytest.mark.asyncio
async def test_off_loop_tells_the_result_or_the_error() -> None:
    assert await off_loop(lambda: 7, "test") == 7
    with pytest.raises(ZeroDivisionError):
        await off_loop(lambda: 1 / 0, "test")


def test_off_loop_outlives_the_loop() -> None:
    over, go_on = [], os.pipe()

    async def begin() -> None:
        off_loop(lambda: over.append(os.read(go_on[0], 1)), "aiokv-test").cancel()

    asyncio.run(begin())
    os.write(go_on[1], b"!")
    import threading

    for thread in threading.enumerate():
        if thread.name == "aiokv-test":
            thread.join()
    assert over == [b"!"]
    for end in go_on:
        os.close(end)
