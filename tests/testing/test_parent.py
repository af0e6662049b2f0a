"""A process that asked to end with its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

#: Begins a child that asks, and ends once that was said.
PARENT = """
import subprocess, sys
code = "import os, time; from aiokv.testing.parent import end_with; print(end_with(os.getppid()), os.getpid(), flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True, end="")
"""  # noqa: E501


def alive(pid: int) -> bool:
    """Whether it runs; who has ended and is not yet waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_ends_when_its_parent_does() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, check=True)
    lived, pid = done.stdout.split()
    assert lived == "True"
    while alive(int(pid)):
        time.sleep(0.01)


def test_a_parent_that_has_ended_is_noticed() -> None:
    code = "from aiokv.testing.parent import end_with; print(end_with(1 << 22))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "False\n"
