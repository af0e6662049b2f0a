"""Loops in virtual time: asyncio as it is, but for the clock; what is frozen, killed and stuck."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator

import pytest

from aiokv.testing.virtual import Deadlock, Livelock, VirtualLoop, VirtualTime, describe_tasks


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    made = VirtualTime()
    yield made
    for loop in [*made.loops]:
        loop.close()


@pytest.fixture
def loop(virtual: VirtualTime) -> VirtualLoop:
    return VirtualLoop(virtual, "alone")


# -- a loop alone -----------------------------------------------------------------------------------


def test_an_hour_takes_no_time(loop: VirtualLoop) -> None:
    async def main() -> float:
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time() - begun

    before = time.monotonic()
    assert loop.run_until_complete(main()) == pytest.approx(3600)
    assert time.monotonic() - before < 60


def test_the_clock_of_nanoseconds_goes_with_the_loop(virtual: VirtualTime, loop: VirtualLoop) -> None:
    async def main() -> None:
        begun = virtual.clock()
        await asyncio.sleep(1e-6)
        assert virtual.clock() == pytest.approx(begun + 1000, abs=1)
        await asyncio.sleep(0.3)
        assert virtual.clock() == pytest.approx(begun + 300_001_000, abs=2)
        assert virtual.clock() == round(loop.time() * 1e9)

    loop.run_until_complete(main())


def test_timers_fire_in_order_and_never_early(loop: VirtualLoop) -> None:
    fired: list[int] = []
    rng = random.Random(1)
    delays = [rng.choice((0.0, 1e-9, 1e-6, 0.1, 0.1, 7.0)) * rng.randint(1, 3) for _ in range(200)]

    async def main() -> None:
        for number, delay in enumerate(delays):
            when = loop.time() + delay
            loop.call_at(when, lambda n=number, w=when: fired.append(n) if loop.time() >= w - 1e-9 else None)
        await asyncio.sleep(60)

    loop.run_until_complete(main())
    assert sorted(fired) == list(range(200))
    assert [delays[number] for number in fired] == sorted(delays)


def test_timeouts_strike_when_they_should(loop: VirtualLoop) -> None:
    async def main() -> float:
        begun = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return loop.time() - begun

    assert loop.run_until_complete(main()) == pytest.approx(5)


def test_callbacks_run_in_the_order_in_which_they_were_scheduled(loop: VirtualLoop) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.call_soon(seen.append, number)
    loop.run_until_complete(asyncio.sleep(0))
    assert seen == list(range(100))


def test_calls_from_other_threads_arrive(loop: VirtualLoop) -> None:
    async def main() -> str:
        future: asyncio.Future[str] = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(future.set_result, "hello"))
        thread.start()
        thread.join()
        return await future

    assert loop.run_until_complete(main()) == "hello"


def test_work_for_threads_is_done_at_once(loop: VirtualLoop) -> None:
    async def main() -> None:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    loop.run_until_complete(main())


def test_there_are_no_descriptors(loop: VirtualLoop) -> None:
    with pytest.raises(NotImplementedError):
        loop.add_reader(0, print)


def test_an_asynchronous_generator_that_is_left_is_closed(loop: VirtualLoop) -> None:
    closed: list[bool] = []

    async def numbers():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert closed == [True]


def test_waiting_for_nothing_is_a_deadlock_that_says_who_waits(loop: VirtualLoop) -> None:
    async def hopeless() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(hopeless(), name="the hopeless one")

    with pytest.raises(Deadlock, match="the hopeless one in Event.wait"):
        loop.run_until_complete(main())
    assert len(describe_tasks(loop)) == 2


def test_going_round_for_ever_is_a_livelock() -> None:
    virtual = VirtualTime(most_turns=1000)
    loop = VirtualLoop(virtual)

    async def main() -> None:
        while True:  # noqa: ASYNC110 - that is the fault
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="1001 turns"):
        loop.run_until_complete(main())
    loop.close()


def test_no_loop_is_left_running(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(1))
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert not loop.is_running()


# -- several loops ----------------------------------------------------------------------------------


def test_loops_share_one_time_and_run_together(virtual: VirtualTime, loop: VirtualLoop) -> None:
    other = VirtualLoop(virtual, "other")
    log: list[tuple[str, float]] = []

    async def ticks(name: str, every: float) -> None:
        mine = asyncio.get_running_loop()
        assert isinstance(mine, VirtualLoop)
        assert mine.name == name
        for _ in range(3):
            await asyncio.sleep(every)
            log.append((name, round(mine.time() - 1000, 6)))

    other.create_task(ticks("other", 1.0))
    loop.run_until_complete(ticks("alone", 1.5))
    assert log == [("other", 1), ("alone", 1.5), ("other", 2), ("alone", 3), ("other", 3), ("alone", 4.5)]


def test_futures_of_one_loop_may_be_resolved_by_another(virtual: VirtualTime, loop: VirtualLoop) -> None:
    other = VirtualLoop(virtual, "other")
    future: asyncio.Future[int] = loop.create_future()

    async def resolve() -> None:
        await asyncio.sleep(2)
        future.set_result(7)

    async def main() -> int:
        return await future

    task = other.create_task(resolve())
    assert loop.run_until_complete(main()) == 7
    assert virtual.settle(0)
    assert task.done()


def test_nothing_of_a_frozen_loop_runs_until_it_is_thawed(virtual: VirtualTime, loop: VirtualLoop) -> None:
    other = VirtualLoop(virtual, "other")
    seen: list[float] = []

    async def work() -> None:
        await asyncio.sleep(1)
        seen.append(other.time() - 1000)

    async def main() -> None:
        task = other.create_task(work())
        await asyncio.sleep(0.5)
        other.frozen = True
        other.call_soon(seen.append, 0.0)
        await asyncio.sleep(5)
        assert not seen
        assert not other.idle
        other.frozen = False
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        assert task.done()

    loop.run_until_complete(main())
    assert seen == pytest.approx([0.0, 5.5])


def test_frozen_for_ever_is_a_deadlock(virtual: VirtualTime, loop: VirtualLoop) -> None:
    async def main() -> None:
        loop.frozen = True
        await asyncio.sleep(1)

    with pytest.raises(Deadlock):
        loop.run_until_complete(main())


def test_a_killed_loop_runs_nothing_and_can_be_closed(virtual: VirtualTime, loop: VirtualLoop) -> None:
    other = VirtualLoop(virtual, "other")
    seen: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("ran")
        finally:
            try:
                await asyncio.sleep(1)
            finally:
                asyncio.get_running_loop().create_task(asyncio.sleep(1))

    async def main() -> None:
        other.create_task(stubborn())
        await asyncio.sleep(0.5)
        other.kill()
        await asyncio.sleep(5)

    loop.run_until_complete(main())
    other.close()
    assert not seen
    assert other.is_closed()


def test_time_may_jump_while_nobody_runs(virtual: VirtualTime, loop: VirtualLoop) -> None:
    async def main() -> float:
        task = asyncio.create_task(asyncio.sleep(1))
        await asyncio.sleep(0)
        virtual.advance(9_000_000_000)
        await task
        return loop.time() - 1000

    assert loop.run_until_complete(main()) == pytest.approx(9)


def test_who_runs_next_is_drawn_and_the_same_each_time() -> None:
    def play(seed: int) -> list[str]:
        virtual = VirtualTime(order=random.Random(seed))
        loops = [VirtualLoop(virtual, name) for name in "abc"]
        log: list[str] = []

        async def turns(name: str) -> None:
            for _ in range(20):
                log.append(name)
                await asyncio.sleep(0)

        for each in loops:
            each.create_task(turns(each.name))
        assert virtual.settle(0)
        for each in loops:
            each.close()
        return log

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_settling_says_whether_it_came_to_rest(virtual: VirtualTime, loop: VirtualLoop) -> None:
    loop.call_later(5, lambda: None)
    assert not virtual.settle(1_000_000_000)
    loop.call_later(50, lambda: None)
    assert virtual.settle(100_000_000_000)
    assert loop.idle
    assert loop.scheduled() == []
    loop.call_later(5, lambda: None)
    assert not virtual.settle(100_000_000_000, lambda: True)
