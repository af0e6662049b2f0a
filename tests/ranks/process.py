"""A group of real processes, each a rank, all forked from one that imported everything once.

As a program: ``process.py FOLDER PLAY-SIZE ...`` runs plays of this module one after another, each in so many
processes, and prints what they gave: a JSON object by play and rank, of return values, or tracebacks; nothing
for a rank that was killed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvloop

import aiokv
from aiokv.errors import AiokvError, ClosedError, DeadlineExceeded, PeerLostError
from aiokv.ranks import Blocks, Hit, Miss, RankGroup
from aiokv.testing.conformance.ranks import CASES
from aiokv.testing.parent import end_with

#: As long as nothing hangs, nobody waits for it.
PATIENCE_S = 50
#: What a rank gives up after, where one never comes.
DEADLINE_S = 1.0

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}

Result = dict[str, Any]


def played(folder: Path, *plays: str) -> dict[str, dict[int, Result]]:
    """Run plays, each its name and the number of ranks; gives what each rank that lived to the end found."""
    paths = [str(Path(aiokv.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, str(folder), *plays],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    found: dict[str, dict[str, Result]] = json.loads(done.stdout)
    return {play: {int(rank): result for rank, result in ranks.items()} for play, ranks in found.items()}


def run(work: Callable[[], Awaitable[Any]], loop: str = "uvloop", *, debug: bool = False) -> Any:
    with asyncio.Runner(loop_factory=LOOPS[loop], debug=debug) as runner:
        return runner.run(work())  # type: ignore[arg-type]


# -- plays: what each rank does, once it is in a group of all


def suite(rank: int, size: int) -> Result:
    """Each case of the suite, on both loops."""
    found: Result = {}
    group = dist.new_group(backend="gloo")

    async def cases(loop: str, ranks: RankGroup) -> None:
        for case in CASES:
            try:
                async with asyncio.timeout(20):
                    await case(ranks)
                found[f"{loop}-{case.__name__}"] = ""
            except Exception:  # noqa: BLE001 - the parent process tells
                found[f"{loop}-{case.__name__}"] = traceback.format_exc()
                break  # the ranks are out of step

    for loop in LOOPS:
        with RankGroup(group) as ranks:
            run(partial(cases, loop, ranks), loop, debug=loop == "asyncio")
    return found


def killed(rank: int, size: int) -> Result:
    """The last rank is killed within an agreement, and those that are left form a new group."""
    ranks = RankGroup(dist.new_group(backend="gloo"))

    async def play() -> Result:
        assert await ranks.agree([Hit(Blocks(rank + 1))]) == [Hit(Blocks(1))]
        if rank == size - 1:
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            # Whoever has to wait for the deadline is as good as never told.
            await ranks.agree([Miss()], deadline=1000)
        except PeerLostError as error:
            return {"error": str(error), "again": await again(ranks)}
        return {}

    found = run(play)
    left = dist.new_group(
        list(range(size - 1)),
        backend="gloo",
        use_local_synchronization=True,
        timeout=dt.timedelta(seconds=20),
    )
    with RankGroup(left) as fewer:
        agreed = run(partial(fewer.agree, [Hit(Blocks(5 + rank))]))
    return {**found, "agreed": agreed[0].held.count, "ranks": fewer.size}


def never(rank: int, size: int) -> Result:
    """The first rank never comes to a batch; the others give up, and soon so does gloo."""
    group = dist.new_group(backend="gloo")
    ranks = RankGroup(group)

    async def play() -> Result:
        await ranks.agree([Miss()])
        if not rank:
            return {}
        try:
            await ranks.agree([Miss()] * 3, deadline=DEADLINE_S)
        except DeadlineExceeded as error:
            return {"error": str(error), "again": await again(ranks)}
        return {"error": ""}

    found = run(play)
    if not rank:
        # It lives on, so that nobody hears of its end instead.
        time.sleep(DEADLINE_S + 0.5)
    return found


def destroyed(rank: int, size: int) -> Result:
    """The process group is destroyed between two batches, and before a ``RankGroup`` is made of it."""
    group = dist.new_group(backend="gloo")

    async def play() -> str:
        with RankGroup(group) as ranks:
            await ranks.agree([Miss()])
            dist.destroy_process_group(group)
            return await again(ranks)

    found = {"again": run(play)}
    try:
        RankGroup(group)
    except ClosedError as error:
        found["made"] = str(error)
    return found


def nccl(rank: int, size: int) -> Result:
    """Each case of the suite, in a group of GPUs."""
    found: Result = {}

    async def cases(ranks: RankGroup) -> None:
        for case in CASES:
            try:
                async with asyncio.timeout(20):
                    await case(ranks)
                found[case.__name__] = ""
            except Exception:  # noqa: BLE001 - the parent process tells
                found[case.__name__] = traceback.format_exc()
                break

    with RankGroup() as ranks:
        run(partial(cases, ranks))
    return found


def nccl_killed(rank: int, size: int) -> Result:
    """The last rank is killed within an agreement by NCCL."""
    ranks = RankGroup()

    async def play() -> Result:
        assert await ranks.agree([Hit(Blocks(rank + 1))]) == [Hit(Blocks(1))]
        if rank == size - 1:
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await ranks.agree([Miss()], deadline=15)
        except AiokvError as error:
            return {"error": f"{type(error).__name__}: {error}", "again": await again(ranks)}
        return {}

    return run(play)


def default(rank: int, size: int) -> Result:
    """The default group, and a group that this process is not in."""
    with RankGroup() as ranks:
        agreed = run(partial(ranks.agree, [Hit(Blocks(rank + 2))]))
    other = dist.new_group([0], backend="gloo")
    try:
        RankGroup(other).close()
    except TypeError as error:
        return {"agreed": agreed[0].held.count, "error": str(error)}
    return {"agreed": agreed[0].held.count}


async def again(ranks: RankGroup) -> str:
    """What the next call raises."""
    try:
        await ranks.agree([Miss()])
    except AiokvError as error:
        return f"{type(error).__name__}: {error}"
    return ""


PLAYS = {play.__name__: play for play in (suite, killed, never, destroyed, default, nccl, nccl_killed)}


# -- the processes


def be(name: str, rank: int, size: int, folder: Path) -> Result:
    torch.set_num_threads(1)
    backend = "gloo"
    if name.startswith("nccl"):
        backend = "nccl"
        # On one GPU: processes of the same host are refused, so they pass for several.
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        # Or torch ends the process of whoever lost a peer.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=PATIENCE_S),
    )
    return PLAYS[name](rank, size)


def play(name: str, size: int, folder: Path) -> dict[int, Result]:
    """Fork so many ranks, and wait for them."""
    folder.mkdir()
    parent, children = os.getpid(), []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            end_with(parent)
            try:
                result = be(name, rank, size, folder)
            except BaseException:  # noqa: BLE001 - the parent process tells
                result = {"failed": traceback.format_exc()}
            (folder / f"{rank}.json").write_text(json.dumps(result))
            # What a lost group still waits for is nobody's business any more.
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    files = {rank: folder / f"{rank}.json" for rank in range(size)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def main(folder: Path, *plays: str) -> None:
    end_with(os.getppid())
    found = {}
    for each in plays:
        name, _, size = each.partition("-")
        found[each] = play(name, int(size), folder / each)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
