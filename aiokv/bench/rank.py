"""One rank of a group: a process that agrees with the others, in the ways that are compared."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from aiokv.bench.child import Line
from aiokv.bench.lag import Ticker
from aiokv.ranks import Blocks, Failed, Hit, Miss, Outcome, RankGroup, Severity
from aiokv.ranks.vector import LENGTH

__all__ = ["CHUNKS", "FUNCTION", "REQUESTS", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.rank:serve"

#: Requests of a batch.
REQUESTS = 64
#: Pieces of 512 tokens in a prompt of 32k.
CHUNKS = 64

#: How late the other ranks come where it is measured what the loop does meanwhile (s).
_LATE_S = 0.005


async def serve(line: Line, *, rank: int, sizes: list[int], store: str, gpus: int = 0) -> None:
    """Join groups of the first so many ranks, and measure what it is told to; of NCCL, if on GPUs."""
    torch.set_num_threads(1)
    backend = "nccl" if gpus else "gloo"
    device = torch.device(f"cuda:{rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    await asyncio.to_thread(
        dist.init_process_group, backend, init_method=f"file://{store}", rank=rank, world_size=max(sizes)
    )
    groups = {size: await asyncio.to_thread(dist.new_group, range(size), backend=backend) for size in sizes}
    with ExitStack() as stack:
        ends = {
            size: _Rank(rank, group, stack.enter_context(RankGroup(group)), device)
            for size, group in groups.items()
            if rank < size
        }
        line.say(pid=os.getpid())
        async for told in line:
            end = ends[told["size"]]
            if told["do"] == "lag":
                line.say(**await end.lag(told["what"], told["count"]))
            else:
                line.say(**await end.measure(told["what"], told["count"]))


class _Rank:
    """This process in one group."""

    def __init__(
        self,
        rank: int,
        group: Any,  # noqa: ANN401 - torch's, untyped
        ranks: RankGroup,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._gpu = device.type == "cuda"
        self._group = group
        self._ranks = ranks
        self._batch: list[Outcome] = [self._found(number) for number in range(REQUESTS)]
        self._keys = [b"request %d of the batch, as a hash" % number for number in range(REQUESTS)]
        self._vector = torch.zeros(LENGTH, dtype=torch.int32, device=device)
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self._rows = torch.zeros(2, ranks.size, LENGTH, dtype=torch.int32, device=device)
        self._plain = [(number % 3, 100 + rank) for number in range(REQUESTS)]

    def _found(self, number: int) -> Outcome:
        """What this rank found for a request: mostly the same on all."""
        if number == 5:
            return Failed(Severity.TIMEOUT)
        return Miss() if number % 9 == self._rank else Hit(Blocks(100 + number % 3 * self._rank))

    async def measure(self, what: str, count: int) -> dict[str, Any]:
        """How long each of so many took (ns), and the CPU of this thread for one on average."""
        run: Callable[[], Awaitable[None]] = getattr(self, f"_{what}")
        await run()  # until here ranks come at different times
        times = []
        cpu = time.thread_time_ns()
        for _ in range(count):
            began = time.monotonic_ns()
            await run()
            times.append(time.monotonic_ns() - began)
        return {"times": times, "cpu_ns": (time.thread_time_ns() - cpu) / count}

    async def lag(self, what: str, count: int) -> dict[str, Any]:
        """How late the loop was (ns, sorted) while this rank waits for others that come late."""
        run: Callable[[], Awaitable[None]] = getattr(self, f"_{what}")
        await run()
        ticker = Ticker()
        ticker.start()
        for _ in range(count):
            if self._rank:
                await asyncio.sleep(_LATE_S)
            await run()
        late = ticker.stop()
        ticker.close()
        return {"late": late}

    async def _ours(self) -> None:
        await self._ranks.agree(self._batch, keys=self._keys)

    async def _bare(self) -> None:
        dist.all_reduce(self._vector, dist.ReduceOp.MIN, group=self._group)
        self._settle()

    async def _exchange(self) -> None:
        dist.all_to_all_single(self._rows[0], self._rows[1], group=self._group)
        self._settle()

    def _settle(self) -> None:
        """Wait until the answer can be read, which on a GPU the call does not."""
        if self._gpu:
            torch.cuda.current_stream().synchronize()

    async def _gather_batch(self) -> None:
        found: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(found, self._plain, group=self._group)

    async def _gather_each(self) -> None:
        for one in self._plain:
            found: list[Any] = [None] * self._ranks.size
            dist.all_gather_object(found, one, group=self._group)

    async def _chunks(self) -> None:
        for _ in range(CHUNKS):
            self._number.fill_(32)
            dist.all_reduce(self._number, dist.ReduceOp.MIN, group=self._group)
            self._number.item()
