"""``nccl``: the producer sends GPU memory over NCCL, between any GPUs of any hosts.

Each link has one communicator of two ranks, made by both ends when there is something to send and let go
of when there has been nothing for a while. Beside it a link has a TCP connection, which proves that both
ends know the token, carries the announcements, and ends when a process does. NCCL's own connections are
neither encrypted nor authenticated; the id under which its ranks meet goes over the proven connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from aiokv.device.base import Buffer, StagingDevice
from aiokv.device.gate import Gate, gated
from aiokv.device.offloop import off_loop
from aiokv.device.poller import CompletionPoller
from aiokv.errors import AiokvError, ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.proto.settings import Settings
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.dialling import Place, open_place
from aiokv.transports.ends import keep_until_lost
from aiokv.transports.greeting import greet
from aiokv.transports.listener import Listener
from aiokv.transports.nccl_calls import Calls, load
from aiokv.transports.nccl_home import Home
from aiokv.transports.nccl_receiver import NcclReceiver
from aiokv.transports.nccl_sender import NcclSender
from aiokv.transports.nccl_staging import Pool
from aiokv.transports.patience import ended_within

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["NcclTransport"]

_log = logging.getLogger(__name__)

#: Links that consumers may have to one transport at a time.
_MAX_LINKS = 4096
#: Bytes that are sent as one message at most, unless one block of the cache is longer. A message costs some
#: 0.2 ms of both ends' time; between hosts, messages of 4 MiB reach two thirds of what these reach.
_SLOT = 16 << 20
_STAGING_BYTES = Settings().nccl_staging_bytes
#: How long the first communicator may take once the producer answered, in seconds: half of what a transfer
#: may take by default, so that the next transport still has its chance.
_PROOF_S = 15.0
#: How long closing waits for aborted communicators, in seconds; what takes longer is left to its thread.
_CLOSE_S = 5.0


class NcclTransport:
    """One engine's end of the NCCL paths; see ``Transport`` for the contract.

    Args:
        ports: Where connections beside NCCL's may come in, the first of them that can be had; none for any
            that is free. NCCL's own take ports of the system's choice.
        advertise: Host name or address that consumers are told to dial, as of ``tcp``.
        staging: Bytes of device memory for chunks that are gathered, and as many for chunks that are
            received; 128 MiB each by default. It is allocated at the start.
        idle_s: How long a communicator is kept that nothing goes over (seconds); one takes some 50 MB of
            device memory at each end.
        calls: NCCL; by default cupy's, imported when the transport starts.

    Raises:
        ValueError: There is no memory to stage anything in.
    """

    def __init__(
        self,
        ports: Sequence[int] = (),
        advertise: str | None = None,
        *,
        staging: int = _STAGING_BYTES,
        idle_s: float = 60.0,
        calls: Calls | None = None,
    ) -> None:
        if staging < 1:
            raise ValueError(f"staging is a number of bytes, not {staging}")
        self._ports = tuple(ports) or (0,)
        self._advertise = advertise
        self._staging = staging
        self._idle_s = idle_s
        self._calls = calls
        self._started = False
        #: None until started and when closed.
        self._listener: Listener | None = None
        self._home: Home | None = None
        self._memory: Buffer | None = None
        self._place = Place("", 0, b"")
        self._accepted: dict[bytes, NcclSender] = {}

    @property
    def name(self) -> str:
        """``"nccl"``."""
        return "nccl"

    @property
    def one_sided(self) -> bool:
        """False: producers send."""
        return False

    async def start(self, cache: KVCache, host: str) -> None:
        """Load NCCL, allocate, and listen for consumers at ``host``."""
        if self._started:
            raise LocalProtocolError("this nccl transport was started before")
        kind = "cuda" if self._calls is None else self._calls.kind
        if cache.device.kind != kind:
            raise DeviceError(f"nccl: the cache is {cache.device.kind} memory, and only a GPU's can be sent")
        sock, place = await open_place(self.name, host, self._ports, self._advertise)
        try:
            home = await self._prepare(cache)
        except BaseException:
            sock.close()
            raise
        self._place = place
        self._listener = Listener(sock, self._place.token, admit=self._admit)
        self._home, self._started = home, True

    async def _prepare(self, cache: KVCache) -> Home:
        """Load and rehearse NCCL, and allocate: all that must not be done while something is in flight."""
        loop = asyncio.get_running_loop()
        calls = self._calls if self._calls is not None else await off_loop(load, "aiokv-nccl-load")
        device = cast(StagingDevice, cache.device)
        blocks = [
            group.block_size * group.halves * group.head_bytes * _heads(group.heads)
            for group in cache.layout.groups
        ]
        size = max(_SLOT, *blocks) if self._staging >= 4 * _SLOT else max(self._staging // 4, *blocks)
        count = max(1, self._staging // size)
        stream = device.stream()

        def bring_up(calls: Calls = calls) -> Buffer:
            calls.use(device.ordinal)
            memory: Buffer = device.allocate(2 * count * size)  # type: ignore[attr-defined]
            try:
                calls.rehearse(device.ordinal, memory.address, stream.handle)  # type: ignore[attr-defined]
            except BaseException:
                _free(memory)
                raise
            return memory

        try:
            memory = self._memory = await off_loop(gated(device, bring_up), "aiokv-nccl-start")
        except AiokvError as error:
            raise DeviceError(f"nccl: {error}") from error
        outgoing, incoming = (
            Pool(memory, half * count * size, count, size, self._relieve) for half in range(2)
        )
        context = getattr(device, "context", None)
        current = nullcontext if context is None else context.current
        gate = getattr(device, "gate", None) or Gate()
        return Home(calls, device, CompletionPoller(loop), outgoing, incoming, self._idle_s, gate, current)

    def _relieve(self) -> None:
        if self._home is not None:
            self._home.relieve()

    def _admit(self, socks: list[socket.socket], link: bytes) -> None:
        (sock,) = socks
        if self._home is None or len(self._accepted) >= _MAX_LINKS:
            sock.close()
            return
        try:
            sender = NcclSender(link, sock, self._home)
        except DeviceError as error:
            _log.warning("nccl: a consumer is refused: %s", error)
            sock.close()
            return
        keep_until_lost(self._accepted, sender)

    def describe(self) -> bytes:
        """Host, port and token."""
        self._opened()
        return self._place.encode()

    def _opened(self) -> Home:
        if self._listener is None or self._home is None:
            raise ClosedError("this nccl transport is not started, or it is closed")
        return self._home

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """Dial the producer, and have some bytes sent through a first communicator."""
        home = self._opened()
        try:
            there = Place.decode(description)
            sock = await there.dial(peer)
            try:
                welcome = await greet(sock, there.token)
                self._opened()
                peer.answered(_PROOF_S)
                end = NcclReceiver(welcome.link, sock, home)
            except BaseException:
                sock.close()
                raise
            try:
                await end.proven
            except BaseException:
                end.close()
                raise
        except (OSError, ValueError, PeerLostError, DeviceError) as error:
            raise PeerLostError(f"nccl to {peer.address}: {error}") from error
        return end

    def accepted(self, link: bytes) -> Link | None:
        """This engine's end of a link that a consumer opened, until it is lost."""
        return self._accepted.get(link)

    async def aclose(self) -> None:
        """Close all links, and free what nothing in flight can touch. May be called twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        home, self._home = self._home, None
        if home is None:
            return
        if home.turn is not None:
            home.turn.cancel()
        ends = list(home.ends)
        for end in ends:  # all are marked before any is aborted for long
            end.close()
        bell = asyncio.Event()
        for end in ends:
            end.on_lost(bell.set)
        home.ended = bell.set
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while home.ends or home.lingering:
                    bell.clear()
                    await bell.wait()
        home.poller.close()
        self._accepted.clear()
        memory, self._memory = self._memory, None
        if memory is not None and not home.ends and not home.lingering:  # or the threads that hang keep it
            freeing = off_loop(gated(home.device, lambda: _free(memory)), "aiokv-nccl-free")
            if await ended_within(_CLOSE_S, {freeing}, "nccl"):
                freeing.result()
            else:
                freeing.add_done_callback(_seen)


def _heads(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]


def _seen(freeing: asyncio.Future[None]) -> None:
    freeing.exception()


def _free(memory: Buffer) -> None:
    memory.close()  # type: ignore[attr-defined]
