"""Calls that wait for a GPU, and operations on it that wait for other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from aiokv.device import gate as gate_module
from aiokv.device.gate import Gate, gated
from aiokv.device.offloop import off_loop


class Call:
    """A call in a thread that lasts until it is told to end."""

    def __init__(self, gate: Gate, *, waits: bool = True) -> None:
        self.made, self.may_end = threading.Event(), threading.Event()
        self.over = off_loop(lambda: self._run(gate, waits), "call")

    def _run(self, gate: Gate, waits: bool) -> None:
        with gate.call(waits=waits):
            self.made.set()
            self.may_end.wait(20)

    async def end(self) -> None:
        self.may_end.set()
        await self.over


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)


async def rung(bell: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await bell.wait()


def refused(gate: Gate, bell: asyncio.Event) -> bool:
    if gate.enter(bell.set):
        gate.leave()
        return False
    return True


@pytest.mark.asyncio
async def test_nothing_is_posted_while_a_call_is_made() -> None:
    gate, bell = Gate(), asyncio.Event()
    assert gate.enter(bell.set)
    gate.leave()
    call, other = Call(gate), Call(gate)
    await until(lambda: call.made.is_set() and other.made.is_set())
    assert not gate.enter(bell.set)
    await call.end()
    assert not gate.enter(bell.set)
    assert not gate.flying
    await other.end()
    await rung(bell)
    assert gate.enter(bell.set)
    assert gate.flying == 1


@pytest.mark.asyncio
async def test_no_call_is_made_before_what_is_in_flight_has_ended() -> None:
    gate, bell = Gate(), asyncio.Event()
    assert gate.enter(bell.set) and gate.enter(bell.set)
    call = Call(gate)
    await until(lambda: refused(gate, bell))  # it holds back others
    gate.leave()
    await asyncio.sleep(0.01)
    assert not call.made.is_set()
    gate.leave()
    await until(call.made.is_set)
    await call.end()


@pytest.mark.asyncio
async def test_what_ends_something_that_is_in_flight_does_not_wait_for_it() -> None:
    gate = Gate()
    assert gate.enter(print)
    call = Call(gate, waits=False)
    await until(call.made.is_set)
    assert not gate.enter(print)
    await call.end()
    gate.leave()


@pytest.mark.asyncio
async def test_one_that_is_stuck_holds_up_no_other_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_WAIT_S", 0.02)
    gate, bell = Gate(), asyncio.Event()
    assert gate.enter(bell.set)  # and never leaves
    call = Call(gate)
    for _ in range(3):  # again and again, others get on
        bell.clear()
        await until(lambda: refused(gate, bell))
        await rung(bell)
    assert not call.made.is_set()
    gate.leave()
    await until(call.made.is_set)
    await call.end()


@pytest.mark.asyncio
async def test_a_call_that_does_not_return_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_CALL_S", 0.02)
    gate, bell = Gate(), asyncio.Event()
    call = Call(gate)
    await until(call.made.is_set)
    while not gate.enter(bell.set):
        await rung(bell)
        bell.clear()
    await call.end()


@pytest.mark.asyncio
async def test_a_loop_that_was_closed_is_not_told() -> None:
    gate = Gate()
    with gate.call():
        other = asyncio.new_event_loop()
        gate._bells[print] = other
        other.close()
    assert not gate._bells


def test_work_goes_through_the_gate_of_its_device() -> None:
    gate = Gate()
    assert gated(SimpleNamespace(gate=gate), lambda: len(gate._held))() == 1
    assert gated(SimpleNamespace(), lambda: len(gate._held))() == 0
    with pytest.raises(ZeroDivisionError):
        gated(SimpleNamespace(gate=gate), lambda: 1 // 0)()
    assert not gate._held
