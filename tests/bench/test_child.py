"""The other process of a pair answers, and is gone when its context ends, however it does."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv
from aiokv.bench.child import ChildFailed, child

HERE = "tests_bench_child"
ROOT = Path(aiokv.__file__).parents[1]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that children can import."""
    (tmp_path / f"{HERE}.py").write_text(
        "import time\n"
        "async def echo(line, **options):\n"
        "    print('this is no answer')\n"
        "    line.say(**options)\n"
        "    async for told in line:\n"
        "        if told['do'] == 'fail':\n"
        "            raise SystemExit(3)\n"
        "        line.say(**told)\n"
        "def sleep(seconds):\n"
        "    time.sleep(seconds)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return HERE


@pytest.mark.asyncio
@pytest.mark.may_block(reason="starting a process blocks")
async def test_it_answers_line_by_line(module: str) -> None:
    async with child(f"{module}:echo", size=3) as process:
        assert await process.heard() == {"size": 3}
        assert await process.ask("this", ids=[1, 2]) == {"do": "this", "ids": [1, 2]}
        pid = process.pid
        assert alive(pid)
    assert not alive(pid)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="starting a process blocks")
async def test_one_that_ends_is_noticed(module: str) -> None:
    async with child(f"{module}:echo") as process:
        await process.heard()
        with pytest.raises(ChildFailed):
            await process.ask("fail")


@pytest.mark.asyncio
@pytest.mark.may_block(reason="starting a process blocks")
async def test_one_that_never_answers_is_killed_when_cancelled(module: str) -> None:
    pids: list[int] = []
    started = asyncio.Event()

    async def wait() -> None:
        async with child(f"{module}:sleep", seconds=600) as process:
            pids.append(process.pid)
            started.set()
            await process.heard()

    task = asyncio.ensure_future(wait())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pids[0])


PARENT = """
import asyncio, sys, uvloop
from aiokv.bench.child import child
async def main():
    async with child(sys.argv[1], seconds=600) as process:
        print(process.pid, flush=True)
        await asyncio.sleep(600)
uvloop.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a dead parent is Linux's")
def test_it_does_not_outlive_a_killed_parent(module: str) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-c", PARENT, f"{module}:sleep"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
    # A pidfd can be read once its process has ended.
    readable, _, _ = select.select([watched], [], [], 30)
    os.close(watched)
    assert readable
