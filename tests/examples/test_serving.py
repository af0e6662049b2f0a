"""What the serving examples do beside aiokv: blocks, the worker thread, the request channel."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

from serving.channel import Message, Reply, RequestFailed, request, serve
from serving.compute import Compute
from serving.paged import BlockPool

# -- blocks


@pytest.mark.asyncio
async def test_blocks_wait_for_those_given_back() -> None:
    pool = BlockPool(4)
    taken = asyncio.Event()

    async def second() -> list[int]:
        async with pool.take(3) as blocks:
            taken.set()
            return blocks

    async with pool.take(2) as blocks:
        assert len(set(blocks)) == 2
        waiting = asyncio.create_task(second())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taken.is_set()
    assert len(set(await waiting)) == 3
    async with pool.take(4) as blocks:
        assert sorted(blocks) == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_a_cancelled_wait_takes_nothing() -> None:
    pool = BlockPool(2)
    async with pool.take(2):
        waiting = asyncio.create_task(pool.take(1).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with pool.take(2):
        pass


@pytest.mark.asyncio
async def test_more_blocks_than_there_are_fail_at_once() -> None:
    with pytest.raises(ValueError, match="3 blocks needed, and there are 2"):
        async with BlockPool(2).take(3):
            pass


# -- the worker thread


@pytest.mark.asyncio
@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancelled_only_once_the_thread_is_done(cancels: int) -> None:
    compute, started, release, ended = Compute(), threading.Event(), threading.Event(), []

    def forward() -> None:
        started.set()
        release.wait()
        ended.append(True)

    running = asyncio.create_task(compute.run(forward))
    await asyncio.to_thread(started.wait)
    for _ in range(cancels):
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended
    assert await compute.run(lambda: "next") == "next"
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.asyncio
async def test_one_forward_at_a_time_in_the_order_asked() -> None:
    compute, running, order = Compute(), threading.Lock(), []

    def forward(number: int) -> None:
        assert running.acquire(blocking=False)
        order.append(number)
        running.release()

    await asyncio.gather(*(compute.run(forward, number) for number in range(8)))
    assert order == list(range(8))
    await asyncio.get_running_loop().shutdown_default_executor()


# -- the request channel


@pytest.mark.asyncio
async def test_replies_come_in_order_and_then_no_more() -> None:
    async def count(message: Message, reply: Reply) -> None:
        for number in range(message["to"]):
            await reply({"number": number})

    async with serve("127.0.0.1:0", count) as address, request(address, {"to": 3}) as replies:
        assert [await replies.next() for _ in range(3)] == [{"number": 0}, {"number": 1}, {"number": 2}]
        with pytest.raises(RequestFailed, match="hung up"):
            await replies.next()


@pytest.mark.asyncio
async def test_what_a_handler_raises_is_told_to_the_client() -> None:
    async def fail(message: Message, reply: Reply) -> None:
        raise ValueError("no such thing")

    async with serve("127.0.0.1:0", fail) as address:
        for _ in range(2):  # and the server lives on
            async with request(address, {}) as replies:
                with pytest.raises(RequestFailed, match="ValueError: no such thing"):
                    await replies.next()


@pytest.mark.asyncio
@pytest.mark.parametrize("who", ["client", "server"])
async def test_hanging_up_cancels_the_handler(who: str) -> None:
    cancelled = asyncio.Event()

    async def hold(message: Message, reply: Reply) -> None:
        await reply({"holding": True})
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serve("127.0.0.1:0", hold) as address:
        async with request(address, {}) as replies:
            await replies.next()
            if who == "server":
                return
        await cancelled.wait()
