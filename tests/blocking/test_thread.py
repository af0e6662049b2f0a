from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from aiokv.blocking.thread import LoopThread, iterate


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    with LoopThread() as made:
        yield made


async def give(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_what_is_awaited_there_is_a_future_here(thread: LoopThread) -> None:
    futures = [thread.submit(lambda at=at: give(at)) for at in range(10)]
    done, left = concurrent.futures.wait(futures)
    assert not left
    assert sorted(each.result() for each in done) == list(range(10))
    assert thread.run(give(7)) == 7
    assert thread.call(lambda: 8) == 8


def test_errors_come_back(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    def refuse() -> object:
        raise TypeError("never")

    assert isinstance(thread.submit(fail).exception(), ValueError)
    assert isinstance(thread.submit(refuse).exception(), TypeError)
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())


def test_a_future_is_over_when_the_work_is(thread: LoopThread) -> None:
    """Also after it was cancelled: what it holds is given back before ``result`` raises."""
    began, may_end = threading.Event(), asyncio.Event()
    tidied = []

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            tidied.append(True)

    future = thread.submit(work)
    began.wait()
    assert future.cancel()
    thread.call(lambda: None)
    assert not future.done()
    thread.post(may_end.set)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert tidied == [True]
    assert future.cancelled()
    assert not future.cancel()


def test_what_was_cancelled_at_once_tidies_up_too(thread: LoopThread) -> None:
    tidied = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tidied.append(True)

    for _ in range(20):
        future = thread.submit(work)
        future.cancel()
        concurrent.futures.wait([future])
        assert future.cancelled()
    assert len(tidied) == 20


def test_nobody_waits_for_ever_once_it_is_closed() -> None:
    thread = LoopThread()
    future = thread.submit(asyncio.Event().wait)
    thread.close()
    thread.close()
    assert future.cancelled()
    assert not future.cancel()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(lambda: give(1))
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(give(1))


def test_it_does_not_wait_for_itself(thread: LoopThread) -> None:
    with pytest.raises(RuntimeError, match="await there"):
        thread.call(lambda: thread.run(give(1)))


def test_iterating(thread: LoopThread) -> None:
    closed = []

    async def count() -> AsyncIterator[int]:
        try:
            for at in range(5):
                await asyncio.sleep(0)
                yield at
        finally:
            closed.append(True)

    assert list(iterate(thread, count())) == [0, 1, 2, 3, 4]
    some = iterate(thread, count())
    assert next(some) == 0
    some.close()  # type: ignore[attr-defined]
    assert closed == [True, True]


def test_the_loops_own_thread_is_told_that_it_would_wait_for_itself() -> None:
    with LoopThread() as thread:
        waited = thread.submit(asyncio.Event().wait)
        for wait in (waited.result, waited.exception, thread.close):
            with pytest.raises(RuntimeError, match="the loop's own thread can't wait for it"):
                thread.call(wait)
        waited.cancel()


def test_who_is_interrupted_comes_back_once_the_work_is_given_up() -> None:
    begun, over = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over.set()

    class Interrupted(BaseException):
        pass

    raised: list[bool] = []

    def handler(*_: object) -> None:
        if not raised:
            raised.append(True)
            raise Interrupted

    def interrupt() -> None:
        """Again and again: a signal that comes just before a thread waits for a lock is heard after that."""
        begun.wait()
        while not raised:
            os.kill(os.getpid(), signal.SIGUSR1)
            over.wait(0.05)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with LoopThread() as thread:
            signalling = threading.Thread(target=interrupt)
            signalling.start()
            with pytest.raises(Interrupted):
                thread.run(work())
            assert over.is_set()
            signalling.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
