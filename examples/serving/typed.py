"""Lines of standard input, as they are typed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TextIO

__all__ = ["lines"]


async def lines(file: TextIO) -> AsyncIterator[str]:
    """Each line of ``file``, which may be a terminal, a pipe or a file.

    Not read in a worker thread: one that waits for a terminal can't be called back, and would hold
    the end of the process until somebody presses return.
    """
    loop, descriptor = asyncio.get_running_loop(), file.fileno()
    reader = asyncio.StreamReader(limit=1 << 20)

    def read() -> bool:
        data = os.read(descriptor, 1 << 16)
        if data:
            reader.feed_data(data)
        else:
            loop.remove_reader(descriptor)
            reader.feed_eof()
        return bool(data)

    try:
        loop.add_reader(descriptor, read)
    except PermissionError:  # a file, which is always ready, so that epoll doesn't take it
        while read():
            pass
    try:
        while line := await reader.readline():
            yield line.decode(errors="replace").strip()
    finally:
        loop.remove_reader(descriptor)
