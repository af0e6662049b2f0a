"""The completion poller on real events."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from aiokv.device.cuda import CudaDevice
from aiokv.device.cudacosts import TYPICAL
from aiokv.device.poller import CompletionPoller
from aiokv.testing.held import Holder

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it waits for the GPU")]


def poller_of(device: CudaDevice) -> CompletionPoller:
    return CompletionPoller(asyncio.get_running_loop(), guard=device.quiet)


@pytest.mark.asyncio
async def test_events_are_awaited_in_their_streams_order(device: CudaDevice, holder: Holder) -> None:
    poller, seen = poller_of(device), []
    streams = [device.stream() for _ in range(3)]
    numbers = [holder.hold(stream) for stream in streams]
    futures = []
    for turn in range(10):
        for number, stream in enumerate(streams):
            future = poller.wait(stream.record(), stream)
            future.add_done_callback(lambda _, what=(number, turn): seen.append(what))
            futures.append(future)
    await asyncio.sleep(0.05)
    assert not seen
    for number in (1, 0, 2):
        holder.release(numbers[number])
        async with asyncio.timeout(10):
            await futures[27 + number]
        await asyncio.sleep(0)
        assert {which for which, _ in seen} >= {number}
    for number in range(3):
        assert [turn for which, turn in seen if which == number] == list(range(10))
    poller.close()


@pytest.mark.asyncio
async def test_idle_costs_nothing(device: CudaDevice) -> None:
    poller = poller_of(device)
    stream = device.stream()
    async with asyncio.timeout(10):
        await poller.wait(stream.record(), stream)
    before = poller.statistics
    await asyncio.sleep(0.05)
    assert poller.statistics == before
    poller.close()


@pytest.mark.asyncio
async def test_a_thousand_events_are_as_many_queries_as_streams(device: CudaDevice, holder: Holder) -> None:
    poller = poller_of(device)
    streams = [device.stream() for _ in range(8)]
    for stream in streams:
        holder.hold(stream)
    events = [(stream, stream.record()) for _ in range(125) for stream in streams]
    futures = [poller.wait(event, stream) for stream, event in events]
    await asyncio.sleep(0.02)
    statistics = poller.statistics
    assert statistics.pending == 1000
    assert statistics.turns
    assert statistics.queries <= 8 * statistics.turns
    holder.release()
    async with asyncio.timeout(10):
        await asyncio.gather(*futures)
    poller.close()


@pytest.mark.asyncio
async def test_several_devices_in_one_process(device: CudaDevice, holder: Holder) -> None:
    """Two GPUs where there are two; otherwise two devices on the same one."""
    ordinal = 1 if torch.cuda.device_count() > 1 else 0
    other = CudaDevice(ordinal, costs=TYPICAL, staging_bytes=1 << 20, offsets_bytes=1 << 20)
    before = torch.cuda.current_device()
    pollers = [poller_of(each) for each in (device, other)]
    mine, theirs = device.stream(), other.stream()
    number = holder.hold(mine)
    theirs.wait(mine.record())
    first = pollers[0].wait(mine.record(), mine)
    second = pollers[1].wait(theirs.record(), theirs)
    await asyncio.sleep(0.02)
    assert not first.done()
    assert not second.done()
    holder.release(number)
    async with asyncio.timeout(10):
        await asyncio.gather(first, second)
    assert torch.cuda.current_device() == before
    for poller in pollers:
        poller.close()
    del theirs
    other.close()


@pytest.mark.asyncio
async def test_a_graph_captured_in_another_thread_survives(device: CudaDevice, holder: Holder) -> None:
    """In the global mode, in which a query by another thread makes the capture fail."""
    poller, stream = poller_of(device), device.stream()
    x, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    failed: list[BaseException] = []
    began, enough = threading.Event(), threading.Event()
    added = 0

    def capture() -> None:
        nonlocal added
        try:
            with torch.cuda.graph(graph, stream=side):
                while not enough.wait(0.002):
                    x.add_(1)
                    added += 1
                    began.set()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)
            began.set()

    thread = threading.Thread(target=capture)
    thread.start()
    await asyncio.to_thread(began.wait)
    for _ in range(20):
        number = holder.hold(stream)
        future = poller.wait(stream.record(), stream)
        await asyncio.sleep(0.002)
        holder.release(number)
        async with asyncio.timeout(10):
            await future
        other = device.stream()
        other.wait(stream.record())
    await asyncio.to_thread(lambda: device.allocate(1 << 20).close())
    assert thread.is_alive()
    enough.set()
    thread.join()
    assert not failed
    assert added > 10
    x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == added
    poller.close()


def test_a_bare_query_makes_a_capture_fail(device: CudaDevice) -> None:
    """What the one above guards from; in a process of its own, as a broken capture is left behind."""
    code = """
        import threading, torch
        x, event = torch.zeros(10, device="cuda"), torch.cuda.Event()
        event.record()
        torch.cuda.synchronize()
        began, asked, failed = threading.Event(), threading.Event(), []

        def capture():
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
                    x.add_(1)
                    began.set()
                    asked.wait()
                    x.add_(1)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=capture)
        thread.start()
        began.wait()
        try:
            event.query()
        except BaseException as error:
            failed.append(error)
        asked.set()
        thread.join()
        print("failed" if failed else "survived")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "failed" in done.stdout, done.stdout + done.stderr


def test_the_threads_capture_mode_is_what_it_was(device: CudaDevice) -> None:
    exchange = device.context.cuda.calls.exchange
    word = ctypes.c_int(2)
    exchange(ctypes.byref(word))
    stream = device.stream()
    with device.quiet:
        assert stream.record().done() in (True, False)
    exchange(ctypes.byref(word))
    assert word.value == 2
