"""Two ranks agree on what both of them hold: one reduction for the batch, and the loop goes on meanwhile.

Each rank is a process, as with tensor parallelism. Here they are forked; torchrun would do as well.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import torch.distributed as dist
import uvloop

import aiokv
from aiokv import Blocks, Failed, Hit, Miss, Severity

KEYS = [b"request-1", b"request-2", b"request-3"]


async def look_up(rank: int, number: int) -> aiokv.Hit | aiokv.Miss:
    """What this rank's own cache holds for a request."""
    if number == 2 and rank == 1:
        raise TimeoutError("the remote tier didn't answer")
    return (Hit(Blocks(12 - rank)), Miss() if rank else Hit(Blocks(7)), Hit(Blocks(4)))[number]


async def main(ranks: aiokv.RankGroup) -> list[aiokv.ranks.Outcome]:
    async with ranks.batch(len(KEYS), keys=KEYS) as batch:  # entered once, whatever happens in here
        for number in range(len(KEYS)):
            try:
                batch[number] = await look_up(ranks.rank, number)
            except TimeoutError as error:  # of this request alone
                batch[number] = Failed(Severity.of(error))
    return batch.agreed


def run(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with aiokv.RankGroup(dist.group.WORLD) as ranks:
        agreed = uvloop.run(main(ranks))
    assert agreed == [Hit(Blocks(11)), Miss(), Failed(Severity.TIMEOUT)]
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        other = multiprocessing.get_context("fork").Process(target=run, args=(1, Path(folder) / "store"))
        other.start()
        run(0, Path(folder) / "store")
        other.join()
    print("equal" if other.exitcode == 0 else "the ranks differ")
