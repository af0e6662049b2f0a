"""An event loop in a thread of its own, and what is waited for from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import uvloop

from aiokv.errors import ClosedError

__all__ = ["Future", "LoopThread", "Shared", "iterate"]

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """What a thread waits for in place of awaiting it.

    It is over when the work is: also after ``cancel``, which asks for the end, and where the work holds
    blocks, nothing touches them any more once ``result`` raises ``CancelledError``.
    """

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._thread = thread
        #: Carries the work out; None until the loop has begun it.
        self._task: asyncio.Future[T] | None = None

    def result(self, timeout: float | None = None) -> T:
        """As of ``concurrent.futures``.

        Raises:
            RuntimeError: This is the loop's own thread, which would wait for itself.
        """
        self._thread.check(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of ``concurrent.futures``, and see ``result``."""
        self._thread.check(self)
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Ask for the end of the work. Never blocks; gives False if it is over already."""
        if self.done():
            return False
        try:
            self._thread.post(self._cancel)
        except RuntimeError:  # the loop is closed
            return False
        return True

    # -- the loop's thread

    def begin(self, call: Callable[[], Awaitable[T]]) -> None:
        """Begin the work; called by the thread."""
        try:
            self._task = asyncio.ensure_future(call())
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            self.set_exception(error)
        else:
            self._task.add_done_callback(self._over)

    def _cancel(self) -> None:
        # What was begun in this turn of the loop runs first: a coroutine that never ran tidies up nothing.
        if self._task is not None:
            asyncio.get_running_loop().call_soon(self._task.cancel)

    def _over(self, task: asyncio.Future[T]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class LoopThread:
    """A thread that runs an event loop until it is closed; it sleeps as long as nothing happens.

    A daemon: it does not keep a process alive whose main thread is through. A context manager.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str = "aiokv") -> None:
        self._loop = uvloop.new_event_loop()
        #: Whether it takes no more; with the lock, so that what it has taken is begun.
        self._closed = False
        #: Taken anew by a signal's handler, or the collector, in the thread that has it.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with self._lock:  # it may have been ended by a SystemExit
                self._closed = True
            try:
                self._loop.run_until_complete(self._end())
            finally:
                self._loop.close()

    async def _end(self) -> None:
        """Cancel what is going on, so that nobody waits for ever, and let it tidy up."""
        await asyncio.sleep(0)  # what was posted in time
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        await self._loop.shutdown_asyncgens()

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    def submit(self, call: Callable[[], Awaitable[T]]) -> Future[T]:
        """Have the loop begin something; what the call raises, the future does. Never blocks.

        Args:
            call: Called on the loop; gives what is to be awaited there.

        Raises:
            ClosedError: The loop is closed.
        """
        future: Future[T] = Future(self)
        self.post(future.begin, call)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it. Interrupted, it comes back once that is given up.

        Raises:
            ClosedError: The loop is closed.
            RuntimeError: This is called on it.
            Exception: What the work raised.
        """
        try:
            self.check()
            future = self.submit(lambda: work)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future])
            raise

    def check(self, future: Future[Any] | None = None) -> None:
        """See that waiting, for this, makes sense.

        Raises:
            RuntimeError: This is the loop's own thread, and it isn't over.
        """
        if threading.current_thread() is self._thread and not (future is not None and future.done()):
            raise RuntimeError("the loop's own thread can't wait for it: await there")

    def call(self, call: Callable[[], T]) -> T:
        """Have the loop call something, and wait for what it gives.

        Raises:
            ClosedError: The loop is closed.
            Exception: What the call raised.
        """

        async def called() -> T:
            return call()

        return self.run(called())

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop call something soon. Never blocks.

        Raises:
            ClosedError: The loop is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the loop is closed")
            self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """Cancel what is going on, stop the loop and wait for the thread. May be called twice.

        Raises:
            RuntimeError: This is the thread.
        """
        self.check()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Opened(Protocol):
    """What is open on a loop: an engine, or a tier."""

    async def __aenter__(self) -> object:
        """Open it."""

    async def aclose(self) -> None:
        """Close it, once all is quiet."""


class Shared:
    """What runs on a thread's loop: somebody's, or one that is made and closed with it. A context manager.

    Args:
        opened: What is opened there.
        thread: Somebody's; None: one is made.
    """

    def __init__(self, opened: Opened, thread: LoopThread | None) -> None:
        self._opened = opened
        self._given = thread
        self._thread = thread

    @property
    def thread(self) -> LoopThread:
        """Runs its loop.

        Raises:
            ClosedError: It was not entered.
        """
        if self._thread is None:
            raise ClosedError("it was not entered")
        return self._thread

    def __enter__(self) -> Self:
        """Open it; the errors are those of entering what it is made of."""
        if self._thread is None:
            self._thread = LoopThread()
        try:
            self._thread.run(self._opened.__aenter__())
        except BaseException:
            if self._given is None:
                self._thread.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is going on, on both sides, and wait until it is quiet. May be called twice."""
        if self._thread is None:
            return
        self._thread.check()
        try:
            if not self._thread.closed:
                self._thread.run(self._opened.aclose())
        finally:
            if self._given is None:
                self._thread.close()


def iterate(thread: LoopThread, source: AsyncIterator[T]) -> Iterator[T]:
    """What an asynchronous iterator gives, waited for one by one; it is closed with this one."""

    async def following() -> tuple[T] | None:
        async for value in source:
            return (value,)
        return None

    async def close() -> None:
        closing = getattr(source, "aclose", None)
        if closing is not None:
            await closing()

    try:
        while (value := thread.run(following())) is not None:
            yield value[0]
    finally:
        with suppress(ClosedError):  # the loop is closed, and with it what it ran
            thread.run(close())
