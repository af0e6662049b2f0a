"""Skips what this machine's kernel refuses, by name."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aiokv.transports.vectors import VectorIO

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def refusal(of_parent: bool) -> str:
    """Why process_vm_readv can't be used; empty if it can."""
    memory, size = np.zeros(2, dtype=np.int64), np.array([8])
    at = memory.ctypes.data
    try:
        VectorIO().read_process(os.getpid(), np.array([at]), np.array([at + 8]), size)
    except OSError as error:
        return f"process_vm_readv is refused on this machine: {error}"
    if of_parent and os.geteuid() and YAMA.exists() and int(YAMA.read_text()):
        return f"process_vm_readv of a parent is refused on this machine: {YAMA} is not 0"
    return ""


@pytest.fixture
def cut_off() -> Callable[[bytes], socket.socket]:
    """Our end of a TCP connection whose other end sent some bytes, and then reset it."""

    def made(data: bytes) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        with theirs:
            theirs.sendall(data)
            while len(ours.recv(len(data), socket.MSG_PEEK)) < len(data):
                pass  # what isn't across yet is lost with a reset
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.setblocking(False)
        return ours

    return made


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("kind") if callspec else None
    needed = kind == "cma" or item.path.name == "test_cma.py" or "from_a_process" in item.name
    if needed and (why := refusal(of_parent=item.path.name == "test_processes.py")):
        pytest.skip(why)
