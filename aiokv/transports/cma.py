"""``cma``: a consumer on the same host reads the producer's memory by ``process_vm_readv``.

For any host memory, with one copy and nothing to map or pass. The kernel allows it where it would
allow ptrace, so containers and hardened hosts often refuse it: that is found out on connecting.

A process id is reused when its process is gone, so it is held by a pidfd, and what was read counts
only if the process is still there afterwards.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer, Event, Stream
from aiokv.device.cache import KVCache
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PeerInfo
from aiokv.transports.extents import Extents, addresses
from aiokv.transports.handshake import MAX_EXTRA, Welcome
from aiokv.transports.local import LocalEnd, LocalTransport, Offer
from aiokv.transports.vectors import VectorIO

__all__ = ["CmaTransport"]

_NONCE = 32
#: struct ucred: process, user and group id.
_CREDENTIALS = struct.Struct("3i")


#: An address in user space.
_At = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """What a producer says to consumers that it lets in; all addresses are in its own process."""

    nonce: bytes
    #: Where the nonce can be read.
    nonce_at: _At
    #: Where each buffer of its placement starts, and its size in bytes.
    buffers: tuple[tuple[_At, int], ...]


class CmaTransport(LocalTransport):
    """One engine's end of the cross-memory paths on its host; see ``Transport``."""

    def __init__(self) -> None:
        super().__init__()
        self._io = VectorIO()
        #: What proves to a consumer that it reads the right process. Stays where it is.
        self._nonce = np.frombuffer(secrets.token_bytes(_NONCE), dtype=np.uint8)

    @property
    def name(self) -> str:
        """``"cma"``."""
        return "cma"

    def _offer(self, cache: KVCache) -> Offer:
        if not (self._io.reads_processes and hasattr(os, "pidfd_open")):
            raise DeviceError("cma: this system, or this Python, can't read another process's memory")
        if cache.device.kind != "host":
            raise DeviceError(f"cma: the cache is {cache.device.kind} memory; only the host's can be read")
        buffers = tuple((buffer.address, buffer.nbytes) for buffer in cache.buffers)
        extra = msgspec.msgpack.encode(_Memory(self._nonce.tobytes(), self._nonce.ctypes.data, buffers))
        if len(extra) > MAX_EXTRA:
            raise DeviceError(f"cma: {len(buffers)} buffers are more than a handshake can tell of")
        return Offer(extra)

    def _withdraw(self) -> None:
        pass

    async def _open(self, sock: socket.socket, welcome: Welcome, cache: KVCache, peer: PeerInfo) -> LocalEnd:
        try:
            there = msgspec.msgpack.decode(welcome.extra, type=_Memory)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"it doesn't say where its memory is: {error}") from error
        if tuple(nbytes for _, nbytes in there.buffers) != peer.placement.buffers:
            raise PeerLostError("its buffers are not those of its placement")
        self._opened()
        process = _Process(sock, self._io)
        try:
            process.prove(there)
            return _ConsumerEnd(welcome.link, self, sock, process, [at for at, _ in there.buffers])
        except BaseException:
            process.close()
            raise


class _Process:
    """The process at the other end of a socket, as the kernel says, not as that process does."""

    def __init__(self, sock: socket.socket, io: VectorIO) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, _, _ = _CREDENTIALS.unpack(credentials)
        if self.pid <= 0:
            raise PeerLostError("its process can't be seen from here (another pid namespace)")
        try:
            #: Readable once the process has ended.
            self.fd = os.pidfd_open(self.pid)
        except OSError as error:
            raise PeerLostError(f"its process {self.pid} can't be held: {error}") from error
        self._io = io

    def read(self, into: NDArray[np.int64], out: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Read all of the ranges ``out`` there to ``into`` here; see ``VectorIO.read_process``."""
        while len(lengths):
            moved = self._io.read_process(self.pid, into, out, lengths)
            if not moved:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            ends = lengths.cumsum()
            first = int(ends.searchsorted(moved, side="right"))
            into, out, lengths = into[first:].copy(), out[first:].copy(), lengths[first:].copy()
            if len(lengths):  # the next range may have been read in part
                read = lengths[0] - (ends[first] - moved)
                into[0] += read
                out[0] += read
                lengths[0] -= read

    def prove(self, there: _Memory) -> None:
        """Read the nonce.

        Raises:
            PeerLostError: It can't be read, or is another one.
        """
        nonce = np.zeros(_NONCE, dtype=np.uint8)
        size = np.array([_NONCE])
        try:
            self.read(np.array([nonce.ctypes.data]), np.array([there.nonce_at]), size)
        except PermissionError as error:
            raise PeerLostError(
                f"process_vm_readv of its process {self.pid} is refused; it takes what ptrace takes: the "
                "same user, kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE, and a container that allows it"
            ) from error
        except OSError as error:
            raise PeerLostError(f"the memory of its process {self.pid} can't be read: {error}") from error
        if not hmac.compare_digest(nonce.tobytes(), there.nonce):
            raise PeerLostError(f"what it wrote is not what can be read in process {self.pid}")

    def close(self) -> None:
        """Let go of it, once."""
        os.close(self.fd)
        self.fd = -1


class _ConsumerEnd(LocalEnd):
    """Reads the producer's memory."""

    def __init__(
        self,
        link: bytes,
        owner: CmaTransport,
        sock: socket.socket,
        process: _Process,
        buffers: Sequence[int],
    ) -> None:
        super().__init__(link, owner.name, sock, owner.ends)
        self._process = process
        #: Where each of the producer's buffers starts, there.
        self._buffers = buffers
        self._extents = Extents()
        # A child that the producer forked may hold the socket open, but has not its memory.
        self.watch(process.fd)

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """Read one chunk, now; on the host ``stream`` has nothing to wait for."""
        if self.lost:
            raise self.lost_error()
        copy, lo, hi = plan.copy(chunk), chunk.lo, chunk.hi
        into, lengths = self._extents.targets(copy, lo, hi, addresses(copy.dst, dst))
        out, _ = self._extents.sources(
            copy, lo, hi, [self._buffers[number] + base for number, base in copy.src]
        )
        failure = None
        try:
            self._process.read(into, out, lengths)
        except OSError as error:
            failure = error
            if error.errno == errno.ESRCH:  # it lost its memory, which comes before its descriptors do
                self._end("the peer's process has ended")
        # Had the process ended before the read, it would be seen now; so it was the right one.
        if not self.alive():
            raise self.lost_error() from failure
        if failure is not None:
            raise DeviceError(f"cma: {chunk} can't be read: {failure}") from failure
        return stream.record()

    def close(self) -> None:
        """Read no more, and tell the producer."""
        self._end("closed at this end")

    def abandon(self) -> None:
        """Let go of the socket and the process."""
        super().abandon()
        if self._process.fd >= 0:
            self._loop.remove_reader(self._process.fd)
            self._process.close()
