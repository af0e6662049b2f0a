"""The other process of a pair: started by ``child``, told what to do by lines of JSON, never orphaned.

As a program it runs one function: ``python -m aiokv.bench.child MODULE:FUNCTION OPTIONS``. A coroutine
function is given a ``Line`` and runs on uvloop; a plain one is given the options alone and runs until the
process is killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import uvloop

import aiokv
from aiokv.testing.parent import end_with

__all__ = ["Child", "ChildFailed", "Line", "child"]

#: Bytes of one line, at most: as many ids and figures as a benchmark may want to tell.
_LIMIT = 64 << 20


class ChildFailed(Exception):
    """The other process ended, or never began; its traceback is on standard error."""


class Child:
    """The other process, as the one that measures sees it; made by ``child``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def ask(self, do: str = "", **facts: object) -> dict[str, Any]:
        """Say something, and wait for the answer. One task at a time.

        Raises:
            ChildFailed: It ended instead.
        """
        self.say(do, **facts)
        return await self.heard()

    def say(self, do: str, **facts: object) -> None:
        """Say something, without waiting for the answer, which ``heard`` gives."""
        if self._process.stdin is None:
            raise ChildFailed("the process has no pipe")
        self._process.stdin.write(json.dumps({"do": do, **facts}).encode() + b"\n")

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended gets none."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def heard(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            ChildFailed: It ended instead.
        """
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"process {self.pid} ended; its traceback is above")
        said: dict[str, Any] = json.loads(line)
        return said


@asynccontextmanager
async def child(
    function: str,
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    **options: object,
) -> AsyncIterator[Child]:
    """A process that runs a function; killed and waited for when the context ends, however it does.

    Args:
        function: ``module:name``.
        fds: Descriptors that it inherits, under the same numbers.
        environment: Variables that it has besides those of this process.
        options: Passed on, as JSON.
    """
    root = str(Path(aiokv.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "aiokv.bench.child",
        function,
        json.dumps(options),
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LIMIT,
        pass_fds=fds,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield Child(process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        # Cancelled or not: a child that was not waited for stays as a zombie.
        waiting = asyncio.ensure_future(process.communicate())
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(waiting)


class Line:
    """The child's end of the line to its parent; an asynchronous iterator of what it is told."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._lines: asyncio.StreamReader | None = None

    def say(self, **facts: object) -> None:
        """One answer."""
        data = memoryview(json.dumps(facts).encode() + b"\n")
        while data:
            data = data[os.write(self._out, data) :]

    def __aiter__(self) -> Line:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._lines is None:
            self._lines = asyncio.StreamReader(limit=_LIMIT)
            protocol = asyncio.StreamReaderProtocol(self._lines)
            await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(0, "rb"))
        line = await self._lines.readline()
        if not line:
            raise StopAsyncIteration
        told: dict[str, Any] = json.loads(line)
        return told


def _main(function: str, options: str, parent: str) -> None:
    if not end_with(int(parent)):
        sys.exit("the parent ended before this process had begun")
    # What libraries print must not be taken for an answer.
    out = os.dup(1)
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    try:
        run = getattr(import_module(module), name)
        if inspect.iscoroutinefunction(run):
            uvloop.run(run(Line(out), **json.loads(options)))
        else:
            run(**json.loads(options))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # whoever waits for an answer hears of it, also where threads of libraries would live on


if __name__ == "__main__":
    _main(*sys.argv[1:])
