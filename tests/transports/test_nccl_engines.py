"""Whole engines over NCCL, on a mocked device that steps by itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiokv.errors import AiokvError, PeerLostError
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.fakenccl import FakeNccl, StagingMockedDevice
from aiokv.testing.pairs import Engines, check_idle, transfer
from aiokv.transports.nccl import NcclTransport
from aiokv.transports.nccl_calls import Calls

#: On a machine that is busy with other things a link may take its time.
PATIENT = Settings(contact_ns=30 * SECOND, liveness_ns=30 * SECOND)


@asynccontextmanager
async def engines(seed: int, count: int, *, settings: Settings = PATIENT, **options) -> AsyncIterator[tuple]:
    """Engines, and the NCCL that they have in common."""
    device = StagingMockedDevice(seed)
    fake = FakeNccl(device, **options)
    steps = device.autostep(asyncio.get_running_loop(), random.Random(seed), 1e-6)
    try:
        async with Engines(settings=settings) as made:
            yield (
                fake,
                *[
                    await made.add(
                        f"e{number}",
                        device=device,
                        transports=[NcclTransport(staging=1 << 20, calls=Calls(fake, kind="mocked"))],
                    )
                    for number in range(count)
                ],
            )
    finally:
        fake.close()
        for _ in range(200):
            if fake.alive():
                await asyncio.sleep(0.01)
        steps.close()
    assert not device.hazards
    assert not fake.faults
    assert not fake.alive()


async def in_flight(engine) -> None:
    """Wait until something was posted to it."""
    async with asyncio.timeout(20):
        link = engine._core.peers.peer_of(engine._core.peers.sessions[0]).link
        while not link._flights:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_a_first_communicator_may_take_longer_than_first_contact(seed: int) -> None:
    """Both ends' machines look at their networks before they meet."""
    hasty = Settings(contact_ns=SECOND // 2, liveness_ns=30 * SECOND)
    async with engines(seed, 2, settings=hasty) as (fake, a, b):
        fake.hang_in_init = True
        moving = asyncio.ensure_future(transfer(a, b, "t"))
        async with asyncio.timeout(20):
            while not a._transports[0]._accepted:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
        await asyncio.sleep(1)
        assert not moving.done()
        fake.hang_in_init = False
        await moving
        check_idle(a, b)


@pytest.mark.asyncio
async def test_a_cycle_of_three_and_traffic_both_ways(seed: int) -> None:
    async with engines(seed, 3) as (_, a, b, c):
        ways = [(a, b), (b, c), (c, a), (b, a), (c, b), (a, c)]
        async with asyncio.TaskGroup() as group:
            for number, (source, target) in enumerate(ways):
                first = 1 + 2 * (number // 3)  # blocks that nobody else reads or writes there
                group.create_task(
                    transfer(
                        source, target, f"t{number}", source=[first, first + 1],
                        target=[first + 4, first + 5], others=False,
                    )
                )  # fmt: skip
        check_idle(a, b, c)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [0, 1])
async def test_a_broken_communicator_fails_what_goes_over_it_and_the_next_goes_well(
    end: int, seed: int
) -> None:
    async with engines(seed, 2, tells=False) as (fake, a, b):
        await transfer(a, b, "before")
        fake.stalled = True

        async def produce() -> None:
            async with a.offer("t", [1, 2]):
                pass

        async def consume() -> None:
            async with b.fetch("t", [3, 4], sources=[a.address]):
                pass

        tasks = [asyncio.ensure_future(work()) for work in (produce, consume)]
        await in_flight(b)
        fake.alive()[end].failure = "made up"
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, AiokvError) for result in results), results
        assert any(isinstance(result, PeerLostError) for result in results), results
        fake.stalled = False
        await transfer(a, b, "afterwards")
        check_idle(a, b)


@pytest.mark.asyncio
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_given_up_while_nothing_moves_both_sides_end_and_hold_nothing(side: str, seed: int) -> None:
    async with engines(seed, 2, tells=False) as (fake, a, b):
        await transfer(a, b, "before")
        fake.stalled = True

        async def produce() -> None:
            async with a.offer("t", [1, 2]):
                pass

        async def consume() -> None:
            async with b.fetch("t", [3, 4], sources=[a.address]):
                pass

        tasks = {"producer": asyncio.ensure_future(produce()), "consumer": asyncio.ensure_future(consume())}
        await in_flight(b)
        tasks[side].cancel()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert all(isinstance(result, AiokvError | asyncio.CancelledError) for result in results), results
        check_idle(a, b)  # nothing is in quarantine either
        fake.stalled = False
        await transfer(a, b, "afterwards")
