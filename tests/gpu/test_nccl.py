"""NCCL between processes: with a GPU each, or on one, where they pass for several hosts (NCCL_HOSTID)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remote import Other, TwoProcessesKit

from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import Engine
from aiokv.testing.conformance.transports import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.may_block("it asks other processes, and waits"),
    pytest.mark.timeout(120),
]

PATH = "aiokv.transports.nccl:NcclTransport"
CHILD = Path(__file__).with_name("engine_child.py")
#: Seconds for what takes less.
PATIENCE_S = 60
BLOCKS = 1024
#: Bytes of one in all layers.
BLOCK = 512 << 10


# -- one transport, two processes -------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(device) -> Iterator[Other]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        if torch.cuda.device_count() == 1:
            patch.setenv("NCCL_HOSTID", "b")
        made = Other()
        if torch.cuda.device_count() == 1:
            patch.setenv("NCCL_HOSTID", "a")
        # What NCCL makes once for a process is no test's leak.
        asyncio.run(first_contact(made, device))
        yield made
        made.close()


class NcclKit(TwoProcessesKit):
    """The first engine is here, all others there: no two in one process meet."""

    async def engine(self, layout: Any) -> Engine:
        self.made = min(self.made, 1)
        return await super().engine(layout)


async def first_contact(other: Other, device: Any) -> None:
    async with NcclKit(0, other, PATH, device, {"staging": 32 << 20}) as kit:
        layout = CacheLayout.attention(
            layers=1, blocks=1, block_size=1, heads=1, head_size=8, dtype="float16"
        )
        await (await kit.engine(layout)).read_from(await kit.engine(layout))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "case",
    # The one that is left out has its engines in one process, where NCCL wants GPUs of their own.
    [case for case in CASES if case.__name__ != "many_lives"],
    ids=lambda case: case.__name__,
)
async def test_conformance_in_two_processes(case: Case, other: Other, device, seed: int) -> None:
    async with NcclKit(seed, other, PATH, device, {"staging": 32 << 20}) as kit:
        await case(kit)


# -- engines ----------------------------------------------------------------------------------------


class Process:
    """A process with an engine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self._hello: asyncio.Future[str] = self._answers.setdefault(
            0, asyncio.get_running_loop().create_future()
        )

    @classmethod
    async def begin(cls, host: str, **options: Any) -> Process:
        root = str(CHILD.parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), PATH, json.dumps(options), stdin=-1, stdout=-1, env=env
        )
        made = cls(process)
        async with asyncio.timeout(PATIENCE_S):
            made.address = await made._hello
        return made

    async def _read(self) -> None:
        while line := await self.process.stdout.readline():
            with contextlib.suppress(ValueError):  # NCCL writes there, too
                answer = json.loads(line)
                future = self._answers.pop(answer["number"])
                if "error" in answer:
                    future.set_result(tuple(answer["error"]))
                else:
                    future.set_result(answer.get("result"))
        for future in self._answers.values():
            if not future.done():
                future.set_result(("gone", ""))

    def tell(self, what: str, **arguments: Any) -> tuple[int, asyncio.Future[Any]]:
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        order = {"number": number, "what": what, "arguments": arguments}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        return number, future

    async def ask(self, what: str, **arguments: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.tell(what, **arguments)[1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.stdin.close()
        await self.process.wait()
        await self._reading


class World:
    """Processes, and random blocks for each transfer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.processes: list[Process] = []
        self.transfers = itertools.count(1)

    async def add(self, *hosts: str, **options: Any) -> list[Process]:
        made = await asyncio.gather(*[Process.begin(host, **options) for host in hosts])
        self.processes += made
        for process in made:
            assert await process.ask("fill", seed=self.random.getrandbits(32)) is None
        return made

    def begin(
        self, source: Process, target: Process, *, blocks: tuple[list[int], list[int]], deadline: float = 30
    ) -> tuple[str, dict[str, tuple[int, asyncio.Future[Any]]]]:
        tid = f"t{next(self.transfers)}"
        there = source.tell("offer", tid=tid, blocks=blocks[0], deadline=deadline)
        here = target.tell("fetch", tid=tid, blocks=blocks[1], source=source.address, deadline=deadline)
        return tid, {"producer": there, "consumer": here}

    def blocks(self, count: int, lo: int = 0, hi: int = BLOCKS) -> tuple[list[int], list[int]]:
        one, other = self.random.sample(range(lo, hi), count), self.random.sample(range(lo, hi), count)
        return one, other

    async def moves(
        self, source: Process, target: Process, count: int = 40, *, lo: int = 0, hi: int = BLOCKS
    ) -> None:
        """A transfer that goes well: fresh blocks, compared."""
        blocks = self.blocks(count, lo, hi)
        _, ends = self.begin(source, target, blocks=blocks)
        async with asyncio.timeout(PATIENCE_S):
            assert [await future for _, future in ends.values()] == [None, None]
        digests = [
            await source.ask("digest", blocks=blocks[0]), await target.ask("digest", blocks=blocks[1]),
        ]  # fmt: skip
        assert digests[0] == digests[1]

    async def idle(self, *processes: Process) -> None:
        for process in processes:
            found = await process.ask("statistics")
            assert (found["leases"], found["quarantined"], found["in_flight"], found["parts"]) == (0, 0, 0, 0)


@contextlib.asynccontextmanager
async def world(seed: int) -> AsyncIterator[World]:
    made = World(seed)
    try:
        yield made
    finally:
        await asyncio.gather(*[process.end() for process in made.processes])


@pytest.mark.asyncio
async def test_traffic_both_ways_and_a_cycle_of_three(seed: int) -> None:
    async with world(seed) as w:
        a, b, c = await w.add("a", "b", "c")
        ways = [(a, b), (b, c), (c, a), (b, a), (c, b), (a, c)]
        for _ in range(2):
            # Each engine reads of one third of its blocks, and writes to others: what is read stays as it is.
            tasks = []
            for number, (source, target) in enumerate(ways):
                first = 150 * number
                tasks.append(w.moves(source, target, 60, lo=first, hi=first + 150))
            await asyncio.gather(*tasks)
        await w.idle(a, b, c)


@pytest.mark.asyncio
async def test_given_up_in_the_middle_by_either_side(seed: int) -> None:
    async with world(seed) as w:
        a, b = await w.add("a", "b")
        await w.moves(a, b)
        for side in ("producer", "consumer", "producer"):
            tid, ends = w.begin(a, b, blocks=w.blocks(1000))
            moved = await b.ask("moving", tid=tid)
            assert moved < 1, "it was over before it could be given up"
            number, _ = ends[side]
            await (a if side == "producer" else b).ask("cancel", number=number)
            async with asyncio.timeout(PATIENCE_S):
                results = {name: await future for name, (_, future) in ends.items()}
            assert results[side][0] == "CancelledError", results
            assert all(result is not None for result in results.values()), results
            await w.idle(a, b)
            await w.moves(a, b)


@pytest.mark.asyncio
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_killed_in_the_middle(side: str, seed: int) -> None:
    async with world(seed) as w:
        a, b = await w.add("a", "b")
        await w.moves(a, b)
        tid, ends = w.begin(a, b, blocks=w.blocks(1000))
        await b.ask("moving", tid=tid)
        dead, left = (a, b) if side == "producer" else (b, a)
        dead.signal(signal.SIGKILL)
        survivor = "consumer" if side == "producer" else "producer"
        async with asyncio.timeout(10):
            assert (await ends[survivor][1])[0] == "PeerLostError"
        await w.idle(left)
        (again,) = await w.add("c")
        await w.moves(again, left)
        await w.moves(left, again)
        await w.idle(left, again)


@pytest.mark.asyncio
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_stopped_in_the_middle(side: str, seed: int) -> None:
    async with world(seed) as w:
        a, b = await w.add("a", "b")
        await w.moves(a, b)
        tid, ends = w.begin(a, b, blocks=w.blocks(1000), deadline=2)
        await b.ask("moving", tid=tid)
        stopped, left = (a, b) if side == "producer" else (b, a)
        stopped.signal(signal.SIGSTOP)
        survivor = "consumer" if side == "producer" else "producer"
        async with asyncio.timeout(10):
            assert (await ends[survivor][1])[0] in ("DeadlineExceeded", "PeerLostError")
        await w.idle(left)
        stopped.signal(signal.SIGCONT)
        async with asyncio.timeout(10):
            assert await ends[side][1] is not None
        await w.idle(left, stopped)
        await w.moves(a, b)
        await w.moves(b, a)


@pytest.mark.asyncio
async def test_what_is_idle_gives_its_memory_back_and_goes_on_when_needed(seed: int) -> None:
    async with world(seed) as w:
        a, b = await w.add("a", "b", idle_s=0.3)
        for _ in range(3):
            await w.moves(a, b)
            for process in (a, b):
                async with asyncio.timeout(20):
                    while await process.ask("communicators"):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.1)
        print("bytes of the GPU in use then:", await a.ask("memory"))


@pytest.mark.asyncio
async def test_large_transfers_one_after_another(seed: int) -> None:
    async with world(seed) as w:
        a, b = await w.add("a", "b")
        for _ in range(3):
            began = time.monotonic()
            _, ends = w.begin(a, b, blocks=w.blocks(1000))
            async with asyncio.timeout(PATIENCE_S):
                assert [await future for _, future in ends.values()] == [None, None]
            print(f"{1000 * BLOCK / (time.monotonic() - began) / 1e9:.2f} GB/s")
        for process in (a, b):
            found = await process.ask("statistics")
            print("longest the loop was held (s):", found["loop_lag_max"])
