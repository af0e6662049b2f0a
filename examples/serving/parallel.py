"""Prefill and decode as groups of ranks, a process each."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from serving.channel import RequestFailed, request
from serving.processes import line_with, program

__all__ = ["Group", "answer", "gpu_of", "groups"]

_SCRIPT = Path(__file__).parents[1] / "rank.py"


class Group(NamedTuple):
    """Ranks that run the model together: where each takes requests, and where its engine is."""

    listens: tuple[str, ...]
    engines: tuple[str, ...]


@asynccontextmanager
async def groups(sizes: Sequence[int], options: argparse.Namespace) -> AsyncIterator[list[Group]]:
    """Groups of so many ranks, a process each. They end when this context, or this process, does."""
    names = ("model", "blocks", "block_size", "threads")
    passed = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiokv-ranks-")))
        starting = []
        for number, size in enumerate(sizes):
            where = f"--store={folder / str(number)}"
            starting.append(
                [
                    await stack.enter_async_context(
                        program(
                            str(_SCRIPT),
                            "--with-parent",
                            f"--rank={rank}",
                            f"--ranks={size}",
                            f"--device={gpu_of(options.device, number + rank)}",
                            where,
                            *passed,
                        )
                    )
                    for rank in range(size)
                ]
            )
        yield [await _group(processes) for processes in starting]


def gpu_of(device: str, number: int) -> str:
    """Where one of several processes runs: each on a GPU of its own, as far as there are any."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return f"cuda:{number % gpus}" if gpus else device


async def _group(processes: Sequence[asyncio.subprocess.Process]) -> Group:
    try:
        told = [json.loads(await line_with(process, "")) for process in processes]
    except RuntimeError as error:
        raise RequestFailed(f"a rank ended before it was ready: {error}") from error
    return Group(tuple(each["listen"] for each in told), tuple(each["engine"] for each in told))


async def answer(prefill: Group, decode: Group, prompt: list[int], limit: int) -> list[int]:
    """Have one prompt answered. One after another: the ranks of a group have to meet them in the same order.

    Raises:
        RequestFailed: A rank failed, or those that decode gave different answers.
    """
    wanted = {"id": uuid.uuid4().hex, "tokens": prompt}
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def compute(address: str) -> None:
        async with request(address, {**wanted, "do": "prefill", "readers": len(decode.listens)}) as replies:
            token = (await replies.next())["token"]
            if not first.done():
                first.set_result(token)
            await replies.next()  # all have read it

    async def go_on(address: str) -> list[int]:
        more = {"do": "decode", "limit": limit, "token": await first, "sources": list(prefill.engines)}
        async with request(address, {**wanted, **more}) as replies:
            answered: list[int] = (await replies.next())["answer"]
            return answered

    try:
        async with asyncio.TaskGroup() as group:
            for address in prefill.listens:
                group.create_task(compute(address))
            decoding = [group.create_task(go_on(address)) for address in decode.listens]
    except ExceptionGroup as failed:
        raise RequestFailed(str(failed.exceptions[0])) from failed
    answers = [task.result() for task in decoding]
    if any(each != answers[0] for each in answers):
        raise RequestFailed(f"the ranks answered differently: {answers}")
    return answers[0]
