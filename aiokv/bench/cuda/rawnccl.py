"""NCCL alone: a communicator of two ranks, and nothing between it and who sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokv.bench.cuda.gpu import Gpu

__all__ = ["RawPair", "environment", "new_id"]

#: Warms the connection up in both directions.
_WARM = 1 << 20


def environment(rank: int, gpus: int = 1) -> dict[str, str]:
    """Variables of one of two processes, for NCCL; none where each has a GPU.

    NCCL refuses two ranks on one GPU of one host; with different host ids they are on two. Its
    connections are then sockets, whose settings are those that were the fastest.
    """
    if gpus > 1:
        return {}
    return {
        "NCCL_HOSTID": "ab"[rank],
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_NTHREADS": "2",
        "NCCL_NSOCKS_PERTHREAD": "8",
        "NCCL_P2P_NET_CHUNKSIZE": "1048576",
    }


def new_id(gpu: Gpu) -> str:
    """A name under which two ranks find each other, in hexadecimal digits."""
    found: bytes = gpu.cuda.cupy.cuda.nccl.get_unique_id()
    return bytes(found).hex()


class RawPair:
    """One end. Making it blocks until the other end has come.

    Args:
        gpu: Where.
        name: The pair's.
        rank: This end: 0 or 1.
    """

    def __init__(self, gpu: Gpu, name: str, rank: int) -> None:
        self._gpu = gpu
        gpu.torch.cuda.set_device(gpu.device.ordinal)  # a thread's own
        self._nccl: Any = gpu.cuda.cupy.cuda.nccl
        self._made = self._nccl.NcclCommunicator(2, bytes.fromhex(name), rank)
        self._peer = 1 - rank
        self._byte: int = self._nccl.NCCL_UINT8
        self.stream = gpu.stream()
        warm = gpu.torch.zeros(_WARM, dtype=gpu.torch.uint8, device="cuda")
        gpu.synchronize()
        for sends in (rank == 0, rank == 1):
            (self.send if sends else self.recv)(warm.data_ptr(), _WARM)
        self.synchronize()

    def send(self, address: int, nbytes: int) -> None:
        """Enqueue."""
        self._made.send(address, nbytes, self._byte, self._peer, self.stream.ptr)

    def recv(self, address: int, nbytes: int) -> None:
        """Enqueue."""
        self._made.recv(address, nbytes, self._byte, self._peer, self.stream.ptr)

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is enqueued within goes as one."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def synchronize(self) -> None:
        """Wait for what was enqueued."""
        self._gpu.runtime.streamSynchronize(self.stream.ptr)
