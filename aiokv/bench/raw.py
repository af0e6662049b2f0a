"""What the transports are compared with: the same bytes by bare sockets, system calls and copies.

Each is as good as its design allows. Nothing is planned, framed or checked, and both sides block.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlainCopy", "ProcessReads", "RawReader", "RawSender"]

#: What a reader asks for: offset and length in the sender's memory.
_RANGE = struct.Struct("!qq")
#: Most ranges that one system call takes (IOV_MAX).
_ENTRIES = 1024


class RawSender:
    """Sends what it is asked for, a thread to each connection, until it is closed.

    Args:
        view: What can be asked for.
        streams: Connections that will come.
    """

    def __init__(self, view: memoryview, streams: int) -> None:
        self._view = view
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=streams)
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        sock, _ = self._listening.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := sock.recv(_RANGE.size, socket.MSG_WAITALL):
                offset, length = _RANGE.unpack(asked)
                sock.sendall(self._view[offset : offset + length])

    def close(self) -> None:
        """Wait until the readers have closed their connections."""
        for thread in self._threads:
            thread.join()
        self._listening.close()


class RawReader:
    """Reads a sender's memory over some connections, a thread to each but where there is only one."""

    def __init__(self, port: int, streams: int) -> None:
        self._socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = _Threads(streams)

    def read(self, view: memoryview) -> None:
        """Fill ``view`` with as many bytes from the start of the sender's memory."""
        self._threads.run(
            [
                partial(_receive, sock, lo, view[lo:hi])
                for sock, (lo, hi) in zip(self._socks, _shares(len(view), len(self._socks)), strict=True)
            ]
        )

    def close(self) -> None:
        """Close the connections, which ends the sender's threads."""
        for sock in self._socks:
            sock.close()
        self._threads.close()


def _receive(sock: socket.socket, offset: int, into: memoryview) -> None:
    sock.sendall(_RANGE.pack(offset, len(into)))
    while into:
        read = sock.recv_into(into, len(into), socket.MSG_WAITALL)
        if not read:
            raise ConnectionError("the sender closed the connection")
        into = into[read:]


class ProcessReads:
    """Bare ``process_vm_readv``.

    Args:
        pid: Of the process that is read.
        address: Of its memory there.
        into: Address of the memory here.
    """

    def __init__(self, pid: int, address: int, into: int) -> None:
        self._pid, self._address, self._into = pid, address, into
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        vector = (ctypes.c_void_p, ctypes.c_ulong)
        self._call.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)

    def read(self, nbytes: int) -> None:
        """One call."""
        self._read(*self.vectors(np.zeros(1, np.int64), np.zeros(1, np.int64), nbytes))

    def vectors(
        self, there: NDArray[np.int64], here: NDArray[np.int64], nbytes: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ranges of ``nbytes`` each at these offsets, as the kernel takes them: there, and here."""
        sizes = np.full(len(there), nbytes)
        return np.stack([there + self._address, sizes], 1), np.stack([here + self._into, sizes], 1)

    def read_vectors(self, vectors: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
        """As many calls as the kernel's limit on ranges takes."""
        there, here = vectors
        for first in range(0, len(there), _ENTRIES):
            self._read(there[first : first + _ENTRIES], here[first : first + _ENTRIES])

    def _read(self, there: NDArray[np.int64], here: NDArray[np.int64]) -> None:
        moved = self._call(self._pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        if moved != there[:, 1].sum():
            raise OSError(f"only {moved} bytes were read")


class PlainCopy:
    """``memcpy`` from one range of this process to another, by some threads.

    Args:
        into: Address.
        out: Address.
        threads: How many; one is the caller.
    """

    def __init__(self, into: int, out: int, threads: int) -> None:
        self._into, self._out, self._threads = into, out, _Threads(threads)
        self._copy = ctypes.CDLL(None).memcpy  # gives the GIL up meanwhile
        self._copy.restype = None
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def copy(self, nbytes: int) -> None:
        """The first bytes, each thread its share."""
        self._threads.run(
            [
                partial(self._copy, self._into + lo, self._out + lo, hi - lo)
                for lo, hi in _shares(nbytes, self._threads.count)
            ]
        )

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


class _Threads:
    """Runs so many things at once; the first in the calling thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1) if count > 1 else None

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        others = [self._pool.submit(each) for each in work[1:]] if self._pool is not None else []
        work[0]()
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _shares(nbytes: int, count: int) -> list[tuple[int, int]]:
    """Ranges of equal size, but for the last, whose starts are aligned to pages."""
    step = -(-nbytes // count // 4096) * 4096
    return [(min(number * step, nbytes), min((number + 1) * step, nbytes)) for number in range(count)]
