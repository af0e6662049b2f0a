"""The process that workers are forked from, in milliseconds, with everything imported; its owner's end.

Nothing that began here outlives its parent, however that ended: the kernel kills who is left, also when it
is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from types import TracebackType
from typing import Self

import msgspec

from aiokv.testing.parent import end_with
from aiokv.testing.soak.orders import Start

__all__ = ["Nursery"]

_PID = 8


class Nursery:
    """The owner's end; a context manager that waits until every process has ended."""

    def __init__(self) -> None:
        #: Of all workers that there ever were.
        self.pids: list[int] = []
        self._orders: socket.socket
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._orders, theirs = socket.socketpair()
        with theirs:
            # In a session of its own, so that Ctrl-C comes to the parent alone, which then ends all.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        try:
            if not self._orders.recv(_PID):  # it has imported everything
                raise RuntimeError("the nursery could not be started")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._orders.close()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def start(self, config: Start) -> tuple[int, socket.socket]:
        """Start a worker; gives its id, and the socket by which it is told what to do."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._orders, [msgspec.json.encode(config)], [theirs.fileno()])
            pid = int.from_bytes(self._orders.recv(_PID), "big")
        self.pids.append(pid)
        return pid, mine

    def alive(self) -> list[int]:
        """Workers that have not ended."""
        return [pid for pid in self.pids if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    """Whether that process is one of the nursery's, and not another one with a number that became free."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return __name__.encode() in file.read()
    except OSError:
        return False


def _serve(orders: socket.socket) -> None:
    """Fork whatever is asked for."""
    from aiokv.testing.soak.worker import live  # everything that takes long

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    here = os.getpid()
    orders.sendall(bytes(_PID))
    while True:
        data, fds, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not data:
            return
        pid = os.fork()
        sock = socket.socket(fileno=fds[0])
        if not pid:
            if not end_with(here):
                os._exit(1)
            orders.close()
            live(msgspec.json.decode(data, type=Start), sock)
            return
        sock.close()
        orders.sendall(pid.to_bytes(_PID, "big"))


if __name__ == "__main__":
    if not end_with(int(sys.argv[2])):
        os._exit(1)
    _serve(socket.socket(fileno=int(sys.argv[1])))
