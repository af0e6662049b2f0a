"""Both variants of the timer: what fires, what doesn't, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest

from aiokv.device.timer import MicroTimer, open_timerfd
from aiokv.errors import ClosedError

timerfd = pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")


class Bell:
    """Counts how often it was called, and wakes who waits for that."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._rung.set()

    async def rung(self) -> None:
        await self._rung.wait()
        self._rung.clear()


@pytest.fixture(params=[pytest.param(True, id="timerfd", marks=timerfd), pytest.param(False, id="loop")])
def precise(request: pytest.FixtureRequest) -> bool:
    return request.param


async def long_enough() -> None:
    """A few turns, the last of them after all that these tests arm would have fired."""
    await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_fires_once_each_time_it_is_armed(precise: bool) -> None:
    bell = Bell()
    timer = MicroTimer(asyncio.get_running_loop(), bell, precise=precise)
    for count in range(1, 4):
        timer.arm(50_000)
        await bell.rung()
        assert bell.count == count
    await long_enough()
    assert bell.count == 3
    timer.close()


@pytest.mark.asyncio
async def test_zero_is_soon_and_not_never(precise: bool) -> None:
    bell = Bell()
    timer = MicroTimer(asyncio.get_running_loop(), bell, precise=precise)
    timer.arm(0)
    assert bell.count == 0
    await bell.rung()
    timer.close()


@pytest.mark.asyncio
async def test_arming_again_replaces(precise: bool) -> None:
    bell = Bell()
    timer = MicroTimer(asyncio.get_running_loop(), bell, precise=precise)
    timer.arm(1_000_000)
    timer.arm(3600 * 10**9)
    await long_enough()
    assert bell.count == 0
    timer.arm(1_000)
    await bell.rung()
    await long_enough()
    assert bell.count == 1
    timer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["disarm", "close"])
async def test_does_not_fire_when_disarmed(precise: bool, end: str) -> None:
    bell = Bell()
    timer = MicroTimer(asyncio.get_running_loop(), bell, precise=precise)
    timer.disarm()
    timer.arm(1_000_000)
    getattr(timer, end)()
    await long_enough()
    assert bell.count == 0
    timer.close()


@pytest.mark.asyncio
async def test_its_callback_may_arm_it_again(precise: bool) -> None:
    bell = Bell()

    def again() -> None:
        bell()
        if bell.count < 3:
            timer.arm(10_000)

    timer = MicroTimer(asyncio.get_running_loop(), again, precise=precise)
    timer.arm(10_000)
    while bell.count < 3:
        await bell.rung()
    await long_enough()
    assert bell.count == 3
    timer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("change", ["disarm", "arm", "close"])
async def test_what_became_due_in_this_turn_can_still_be_changed(precise: bool, change: str) -> None:
    """The loop has seen the descriptor ready, but the change comes before the timer's callback."""
    loop = asyncio.get_running_loop()
    bell = Bell()
    first = MicroTimer(loop, lambda: settle(second), precise=precise)
    second = MicroTimer(loop, lambda: settle(first), precise=precise)
    fired: list[MicroTimer] = []

    def settle(other: MicroTimer) -> None:
        fired.append(other)
        bell()
        if change == "arm":
            other.arm(3600 * 10**9)
        else:
            getattr(other, change)()

    # Both become due while the loop is held, so one turn sees both, and the first stops the other.
    first.arm(1_000)
    second.arm(1_000)
    deadline = time.monotonic_ns() + 3_000_000  # also past what loop timers make of it
    while time.monotonic_ns() < deadline:
        pass
    await bell.rung()
    await long_enough()
    assert len(fired) == 1
    first.close()
    second.close()


@pytest.mark.asyncio
async def test_what_its_callback_raises_goes_to_the_loop(precise: bool) -> None:
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    told = asyncio.Event()

    def handle(_: object, context: dict[str, object]) -> None:
        errors.append(context["exception"])
        told.set()

    def fail() -> None:
        raise BlockingIOError

    usual = loop.get_exception_handler()
    loop.set_exception_handler(handle)
    timer = MicroTimer(loop, fail, precise=precise)
    for _ in range(2):
        told.clear()
        timer.arm(1_000)
        await told.wait()
    loop.set_exception_handler(usual)
    assert [type(error) for error in errors] == [BlockingIOError, BlockingIOError]
    timer.close()


@timerfd
@pytest.mark.asyncio
async def test_has_no_descriptor_until_armed_and_none_after_close() -> None:
    timer = MicroTimer(asyncio.get_running_loop(), Bell())
    assert timer._fd == -1
    timer.disarm()
    assert timer._fd == -1
    timer.arm(3600 * 10**9)
    fd = timer._fd
    os.fstat(fd)
    timer.disarm()
    timer.arm(3600 * 10**9)
    assert timer._fd == fd
    timer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.asyncio
async def test_a_closed_timer_can_not_be_armed(precise: bool) -> None:
    timer = MicroTimer(asyncio.get_running_loop(), Bell(), precise=precise)
    timer.arm(3600 * 10**9)
    timer.close()
    timer.close()
    timer.disarm()
    with pytest.raises(ClosedError):
        timer.arm(1)


def test_can_be_closed_after_its_loop(precise: bool) -> None:
    loop = asyncio.new_event_loop()
    timer = MicroTimer(loop, lambda: None, precise=precise)
    timer.arm(3600 * 10**9)
    loop.close()
    timer.close()
    assert timer._fd == -1


class Unwatching(asyncio.SelectorEventLoop):
    """A loop that can't watch descriptors, such as Windows' and most simulated ones."""

    def add_reader(self, fd: object, callback: object, *args: object) -> None:
        raise NotImplementedError


def test_uses_loop_timers_where_descriptors_can_not_be_watched() -> None:
    async def main() -> None:
        bell = Bell()
        timer = MicroTimer(asyncio.get_running_loop(), bell)
        timer.arm(1_000)
        await bell.rung()
        assert timer._fd == -1
        timer.arm(3600 * 10**9)
        timer.close()

    with asyncio.Runner(loop_factory=Unwatching) as runner:
        runner.run(main())


@pytest.mark.asyncio
async def test_uses_loop_timers_when_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("aiokv.device.timer.open_timerfd", none_left)
    bell = Bell()
    timer = MicroTimer(asyncio.get_running_loop(), bell)
    timer.arm(1_000)
    await bell.rung()
    timer.close()


@timerfd
def test_a_refused_setting_is_an_error() -> None:
    fd, set_time = open_timerfd()
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        set_time(fd, 1)
