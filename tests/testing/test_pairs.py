"""The kit that makes engines: pairs that work, bytes that are compared, and time that is not needed."""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
import numpy as np
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.errors import InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.testing.pairs import (
    LAYOUT,
    Engines,
    check_idle,
    connected_pair,
    kv_of,
    settle,
    transfer,
    virtual_time,
)


@pytest.mark.asyncio
async def test_a_pair_is_there_at_once_and_moves_both_ways() -> None:
    async with connected_pair() as (a, b):
        assert (a.address, b.address) == ("memory://a", "memory://b")
        await transfer(a, b, "pull")
        await transfer(b, a, "push", push=True)


@pytest.mark.asyncio
async def test_a_transfer_that_fails_raises_its_own_error() -> None:
    async with connected_pair() as (a, b):
        with pytest.raises(InvalidBlocks):
            await transfer(a, b, "t", source=[LAYOUT.groups[0].blocks])


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
async def test_a_pair_may_use_what_processes_use(transport: str) -> None:
    async with connected_pair(transports=[transport], bind="tcp://127.0.0.1:0") as (a, b):
        assert a.address.startswith("tcp://127.0.0.1:")
        await transfer(a, b, "t")


@pytest.mark.asyncio
async def test_a_pair_that_holds_something_in_the_end_is_an_error() -> None:
    with pytest.raises(AssertionError, match="memory://a: offers is 1"):
        async with connected_pair() as (a, _):
            a.offer("forgotten", [1]).start()


class Forgetful(MockedDevice):
    """Copies nothing, and says that it did."""

    def copy(self, *args: object, **kwargs: object) -> None:
        pass


@virtual_time
async def test_bytes_that_did_not_arrive_are_an_error() -> None:
    async with Engines() as engines:
        device = Forgetful(1)
        a, b = await engines.add("a"), await engines.add("b", device=device)
        device.autostep(asyncio.get_running_loop(), random.Random(1), 1e-4)
        with pytest.raises(AssertionError):
            await transfer(a, b, "t")


@pytest.mark.asyncio
async def test_settling_ends_when_nothing_happens_without_time() -> None:
    async with connected_pair() as (a, b):
        offer = a.offer("t", [1], to=[b.address])
        offer.start()
        await settle(a, b)
        assert b.statistics().parked == 1
        offer.cancel()
        await settle(a, b)
        check_idle(a, b)
        assert offer.done()


def test_in_virtual_time_a_minute_takes_no_time() -> None:
    @virtual_time
    async def test() -> None:
        async with connected_pair() as (a, _):
            offer = a.offer("t", [1], deadline=3600)
            offer.start()
            with pytest.raises(TimeoutError):
                await offer.wait()

    began = time.monotonic()
    test()
    assert time.monotonic() - began < 60


def test_in_virtual_time_a_task_that_is_left_is_an_error() -> None:
    @virtual_time
    async def test() -> None:
        left.append(asyncio.ensure_future(asyncio.sleep(3600)))

    left: list[object] = []
    with pytest.raises(AssertionError, match="sleep"):
        test()


def test_in_virtual_time_an_error_that_nobody_sees_is_an_error() -> None:
    @virtual_time
    async def test() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        test()


@virtual_time
async def test_an_engine_can_be_closed_before_the_others_and_followed() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b", device=MockedDevice(1), heads=(0, 4))
        await engines.close(a)
        again = await engines.add("a", heads=(0, 2))
        assert again.cache.layout.groups[0].heads == (0, 2)
        check_idle(b, again)


AXES = [("sbthd", False), ("bsthd", False), ("bshtd", False), ("bhtsd", False), ("bthd", True)]


@virtual_time
@pytest.mark.parametrize(("axes", "split"), AXES)
async def test_kv_is_looked_at_in_the_same_order_whatever_the_axes(axes: str, split: bool) -> None:
    group = msgspec.structs.replace(LAYOUT.groups[0], axes=axes, split=split)
    other = CacheLayout((group,), model=LAYOUT.model)
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b", other)
        assert kv_of(b.cache, [1, 2]).shape == (4, 2, 8, 4, 8)
        await transfer(a, b, "t", source=(1, 2), target=(4, 3))
        await transfer(b, a, "u", source=(4, 3), target=(5, 6))
        assert np.array_equal(kv_of(a.cache, [1, 2]), kv_of(a.cache, [5, 6]))
