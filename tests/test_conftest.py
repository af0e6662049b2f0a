"""The traps and guards of conftest.py still catch what they are for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import aiokv

FAULTS = """
import asyncio, mmap, os, socket, subprocess, sys, threading, time
from pathlib import Path

import pytest
import aiokv

kept = []
scope = {"time": time}
# As if it stood in aiokv: the trap goes by the file that calls.
exec(compile("def nap(): time.sleep(0)", str(Path(aiokv.__file__).with_name("nap.py")), "exec"), scope)


@pytest.mark.asyncio
async def test_blocks():
    scope["nap"]()


@pytest.mark.asyncio
@pytest.mark.may_block("it is allowed to")
async def test_may_block():
    scope["nap"]()


def test_blocks_without_a_loop():
    scope["nap"]()


@pytest.mark.asyncio
async def test_leaves_task():
    kept.append(asyncio.create_task(asyncio.sleep(60)))


@pytest.mark.asyncio
async def test_leaves_error():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)


def test_leaves_descriptor():
    kept.append(socket.socket())


def test_leaves_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, daemon=True).start()


def test_leaves_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


def test_leaves_mapping():
    segment = os.memfd_create("segment")
    os.truncate(segment, 4096)
    kept.append(mmap.mmap(segment, 4096))
    os.close(segment)


@pytest.mark.asyncio
@pytest.mark.timeout(0.5)
async def test_hangs():
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_leaves_nothing(seed):
    assert await asyncio.to_thread(lambda: seed) == seed
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    assert await process.wait() == 0
"""


def test_faults_are_caught(tmp_path: Path) -> None:
    here = Path(__file__)
    shutil.copy(here.with_name("conftest.py"), tmp_path)
    (tmp_path / "test_faults.py").write_text(FAULTS)
    arguments = [
        "-rA",
        "-p",
        "no:cacheprovider",
        "-c",
        here.parents[1] / "pyproject.toml",
        "--rootdir",
        tmp_path,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, tmp_path / "test_faults.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seen: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\S+)", done.stdout, re.MULTILINE):
        seen.setdefault(name, set()).add(outcome)
    both = {
        "test_blocks": {"FAILED"},
        "test_hangs": {"FAILED"},
        "test_leaves_error": {"PASSED", "ERROR"},
        "test_leaves_nothing": {"PASSED"},
        "test_leaves_task": {"PASSED", "ERROR"},
        "test_may_block": {"PASSED"},
    }
    assert seen == {
        "test_blocks_without_a_loop": {"PASSED"},
        "test_leaves_descriptor": {"PASSED", "ERROR"},
        "test_leaves_mapping": {"PASSED", "ERROR"},
        "test_leaves_process": {"PASSED", "ERROR"},
        "test_leaves_thread": {"PASSED", "ERROR"},
        **{f"{name}[{loop}]": outcomes for name, outcomes in both.items() for loop in ("debug", "uvloop")},
    }, done.stdout
    assert "repeat this run: --seed" in done.stdout
