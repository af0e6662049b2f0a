"""Programs that an example starts, and ends with itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["line_with", "program"]


@asynccontextmanager
async def program(*arguments: str, patience: float = 5.0) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python arguments...``, with pipes; terminated when the context is left, then killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for whoever started it
    )
    try:
        yield process
    finally:
        ending = asyncio.ensure_future(_end(process, patience))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)


async def _end(process: asyncio.subprocess.Process, patience: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(patience):
            await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def line_with(process: asyncio.subprocess.Process, beginning: str) -> str:
    """What follows ``beginning`` in the line that begins so.

    Raises:
        RuntimeError: The program ended before.
    """
    if process.stdout is None:
        raise RuntimeError("it has no pipe")
    while line := (await process.stdout.readline()).decode():
        if line.startswith(beginning):
            return line.removeprefix(beginning).strip()
    raise RuntimeError(f"it ended before it said {beginning!r}")
