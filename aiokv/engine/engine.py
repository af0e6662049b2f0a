"""``TransferEngine``: one rank's runtime, as its user sees it.

It checks what callers pass, brings everything up and takes it down again, in order: transports
and control channel before the core that uses them, and the other way round.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from types import TracebackType
from typing import Literal, Self

import msgspec

from aiokv.control.access import checked_access
from aiokv.control.address import canonical
from aiokv.control.base import MAX_FRAME, Channel
from aiokv.control.choice import channel_at, checked_binding
from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.device.cache import KVCache
from aiokv.engine.arguments import (
    BlockIds,
    block_lists,
    checked_addresses,
    checked_id,
    checked_priority,
    checked_stream,
    checked_trace,
    room_of,
    seconds,
    wanted_tokens,
    whole,
)
from aiokv.engine.bell import Bell
from aiokv.engine.choices import (
    checked_ports,
    checked_streams,
    checked_transports,
    host_of,
    imported,
    transports_named,
)
from aiokv.engine.core import Core
from aiokv.engine.course import Course, FetchCourse
from aiokv.engine.leases import BlockLeases
from aiokv.engine.statistics import Statistics
from aiokv.engine.stopwatch import Trace
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import ClosedError, DeviceError, InvalidBlocks
from aiokv.proto.messages import OLDEST_VERSION, VERSION, Hello, encode_message
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import Settings
from aiokv.proto.transfers import Fetching, Offering
from aiokv.transports.base import Transport
from aiokv.transports.handshake import STREAMS

__all__ = ["TransferEngine"]

_log = logging.getLogger("aiokv")

#: Bytes of a frame that the first message leaves to the header and to the address that a peer was called by.
_HEADER = 4096


class TransferEngine:
    """Moves KV cache between this process and others; one for each rank.

    An async context manager: entering binds the control channel and the transports, leaving
    aborts what is going on, on both sides, and gives everything back. Its methods belong to the
    thread of the loop that it was entered on, but for ``Offer.layer_ready``.

    Args:
        cache: The registered memory; it can't be closed while the engine is entered.
        bind: Address of the control channel; port 0 takes a free one.
            ``tcp://host:port`` is ZeroMQ's, ``stream://`` plain TCP, ``tls://`` TLS; the engines of a
            system use the same. Other hosts than this one's are refused without keys or certificates.
        advertise: What peers are told instead of the bound address (containers, NAT).
        keys: This engine's own, for ``tcp://``: then all control traffic is encrypted, only those in
            ``allow`` are talked to, and addresses name keys.
        allow: Public keys of the peers; with ``tls``, fingerprints of their certificates, by default
            of all that the authority vouches for.
        tls: Certificates, for ``tls://``.
        insecure: Let ``bind`` be reached from other hosts by whoever is there.
        transports: Which data paths may be used, best first: names, or transports made by the
            caller. By default all that fit the cache, best first.
        data_ports: Ports that the data connections of ``tcp`` and ``nccl`` may come in at, at least one for
            each, which takes the first that can be had (containers, NAT, firewalls); by default any that is
            free. Peers reach them at the host of ``advertise``, where that is given.
        tcp_streams: Connections of each ``tcp`` link, 1 to 16; the lower of the two ends' numbers
            is used.
        settings: Timers and bounds.
        channel: A control channel made by the caller, in place of ``bind`` and what belongs to it.
        clock: Nanoseconds of the clock that leases are written in; shared by a host's processes.
        trace: Records what each transfer does and when, such as ``aiokv.tracing.Recorder``.

    Attributes:
        cache: As given.
        address: Where peers reach this engine; empty before it is entered.

    Raises:
        TypeError: An argument of the wrong kind; the message names it.
        ValueError: An address, or a choice of transports, that can't be meant.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        keys: Keys | None = None,
        allow: Sequence[str] | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        transports: Sequence[str | Transport] | None = None,
        data_ports: Sequence[int] = (),
        tcp_streams: int = STREAMS,
        settings: Settings | None = None,
        channel: Channel | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        trace: Trace | None = None,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is a KVCache, not {cache!r}")
        if settings is not None and not isinstance(settings, Settings):
            raise TypeError(f"settings is a Settings, not {settings!r}")
        if channel is not None and not (hasattr(channel, "start") and hasattr(channel, "open")):
            raise TypeError(f"channel is a control channel (see control.base), not {channel!r}")
        if not callable(clock):
            raise TypeError(f"clock is a function that gives nanoseconds, not {clock!r}")
        if trace is not None and not callable(getattr(trace, "track", None)):
            raise TypeError(f"trace is a recorder (see aiokv.tracing), not {trace!r}")
        if channel is None:
            checked_binding(bind, advertise)
            self._access = checked_access(bind, keys, allow, tls, insecure=insecure, advertise=advertise)
        self.cache = cache
        self._settings = settings or Settings()
        self._clock = clock
        self._trace = trace
        self._bind, self._advertise = bind, advertise
        self._chosen = checked_transports(transports, cache.device.kind)
        self._data_ports = checked_ports(data_ports, self._chosen)
        self._tcp_streams = checked_streams(tcp_streams)
        #: The caller's channel; or ours, None until it is made.
        self._channel = channel
        #: What was chosen; empty until it is made.
        self._transports: list[Transport] = []
        self._state: Literal["new", "starting", "open", "closing", "closed"] = "new"
        #: Why it closed by itself: nothing works on the cache's device any more.
        self._lost: DeviceError | None = None
        self.address = ""
        #: Keeps the cache open for as long as this engine is.
        self._keeping = ExitStack()
        #: Takes back that we hear of the device's loss.
        self._watching = ExitStack()
        #: The working parts; None until entered.
        self._core: Core | None = None
        #: Closes everything; None until that was asked for.
        self._closing: asyncio.Future[None] | None = None
        #: Rung when a frame came in; closing waits for the peers' acknowledgements.
        self._heard = Bell()

    def __repr__(self) -> str:
        if self._core is None or self._state not in ("open", "closing"):
            return f"<TransferEngine {self._state}>"
        table, peers = self._core.table, len(self._core.peers.sessions)
        return (
            f"<TransferEngine at {self.address} {self._state}, {peers} peers, "
            f"{table.count('producer')} offers, {table.count('consumer')} fetches>"
        )

    # -- life

    async def __aenter__(self) -> Self:
        """Bind the control channel and make the transports ready.

        Raises:
            ClosedError: It was entered before, or its cache is closed.
            DeviceError: No transport can serve this cache.
            OSError: The address can't be bound.
            ValueError: No peer could read what this engine has to say of itself.
        """
        if self._state != "new":
            raise ClosedError(f"an engine can be entered once; this one is {self._state}")
        self._state = "starting"
        try:
            await self._start()
        except BaseException:
            self._state = "closed"
            await self._release()
            raise
        self._state = "open"
        return self

    async def _start(self) -> None:
        self._keeping.enter_context(self.cache.kept_open())
        kind = self.cache.device.kind
        await imported(self._chosen, self._bind if self._channel is None else None, kind)
        if self._channel is None:
            self._channel = channel_at(self._bind, self._advertise, self._access)
        self._transports = transports_named(
            self._chosen,
            ports=self._data_ports,
            advertise=self._advertise,
            streams=self._tcp_streams,
            kind=kind,
            settings=self._settings,
        )
        started, faults = [], []
        for transport in self._transports:
            try:
                await transport.start(self.cache, host_of(self._bind))
                started.append(transport)
            except (DeviceError, OSError) as error:
                faults.append(f"{transport.name}: {error}")
        if not started:
            raise DeviceError(f"no transport can serve this cache: {'; '.join(faults)}")
        for fault in faults:
            _log.debug("transport left out: %s", fault)
        self.address = await self._channel.start(self._on_frame)
        hello = Hello(
            versions=(OLDEST_VERSION, VERSION),
            address=self.address,
            layout=self.cache.layout,
            placement=self.cache.placement,
            transports={transport.name: transport.describe() for transport in started},
        )
        _check_sayable(hello)
        me = Identity(os.urandom(16), hello)
        track = self._trace.track(self.address, me.incarnation) if self._trace is not None else None
        self._watch_device()
        self._core = Core(me, self.cache, self._channel, started, self._settings, self._clock, track)

    def _watch_device(self) -> None:
        """Hear of it when nothing works on the cache's device any more."""
        on_lost = getattr(self.cache.device, "on_lost", None)
        if on_lost is not None:
            loop = asyncio.get_running_loop()

            def lost(error: DeviceError) -> None:
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(self._on_device_lost, error)

            self._watching.callback(on_lost(lost))

    def _on_device_lost(self, error: DeviceError) -> None:
        """Close by ourselves: no transfer can succeed, and the peers are to hear of it now."""
        if self._state != "open":
            return
        _log.error("%r closes: %s", self, error)
        core, self._state, self._lost = self._opened(), "closing", error
        self._closing = asyncio.ensure_future(self._close(core))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is going on, on both sides, wait until it is quiet, and give everything back.

        Ends within the drain bound plus a second, also when peers don't answer. May be called
        twice. Cancelling it doesn't stop it; the cancellation comes out when it is done.
        """
        if self._state == "open":
            core, self._state = self._opened(), "closing"
            self._closing = asyncio.ensure_future(self._close(core))
        cancelled: asyncio.CancelledError | None = None
        while (closing := self._closing) is not None:
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
                if closing.cancelled() and self._state == "closing" and self._core is not None:
                    # asyncio.run cancels all tasks in the end: this one before it had begun.
                    if self._closing is closing:
                        self._closing = asyncio.ensure_future(self._close(self._core))
                    continue
            if closing.done():
                break
        if cancelled is not None:
            raise cancelled

    async def _close(self, core: Core) -> None:
        going = core.courses
        try:
            for course in going:
                if self._lost is not None:
                    failure = DeviceError(f"transfer {course.transfer}: {self._lost}")
                    core.abort(course.transfer, failure, "failed")
                    continue
                error = ClosedError(f"transfer {course.transfer}: its engine was closed")
                core.abort(course.transfer, error, "closed")
            for course in going:
                while not course.over:
                    # asyncio.run cancels all tasks in the end, this one too; blocks in use come first.
                    with suppress(asyncio.CancelledError):
                        await course.quiet()
            await self._say_goodbye(core)
        finally:
            self._state = "closed"
            await self._release()

    async def _say_goodbye(self, core: Core) -> None:
        """Wait, for at most a second, until the peers have read the last messages; then say BYE."""
        waiting = [session for session in core.peers.sessions if _unread(session)]
        for session in waiting:
            session.ask()
        core.wake()
        try:
            async with asyncio.timeout(self._settings.close_ns / 1e9):
                while any(_unread(session) for session in waiting):
                    await self._heard.wait()
        except TimeoutError:
            _log.info("closing: not every peer acknowledged the last message")
        for session in core.peers.sessions:
            core.peers.end(session, ClosedError("this engine was closed"), tell=True)

    async def _release(self) -> None:
        async with AsyncExitStack() as stack:  # from the last to the first, whatever fails
            stack.callback(self._let_go)
            stack.callback(self._watching.close)
            if self._channel is not None:
                stack.push_async_callback(self._channel.aclose)
            # Last here, so first to end: what is freed behind a kernel of NCCL's may wait for it for ever.
            for transport in sorted(self._transports, key=lambda each: each.name == "nccl"):
                stack.push_async_callback(transport.aclose)
            if self._core is not None:
                tasks = list(self._core.peers.tasks)
                self._core.close()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _let_go(self) -> None:
        """The cache may be closed, unless something in flight may still write to it."""
        blocks = self._core.quarantined if self._core is not None else 0
        if blocks and self._lost is None:
            _log.error(
                "%r closed while copies of %d blocks of %r may still be in flight: the cache can't be closed "
                "and its memory must be kept until this process ends",
                self,
                blocks,
                self.cache,
            )
            self.cache.keep(self._keeping)  # it would be let go with this engine
            return
        self._keeping.close()

    def _on_frame(self, data: bytes) -> None:
        if self._core is not None and self._state in ("open", "closing"):
            sender = self._channel.sender if self._channel is not None else ""
            self._core.demultiplexer.receive(data, sender)
            self._heard.ring()

    def _opened(self) -> Core:
        if self._lost is not None:
            raise DeviceError(f"the engine is {self._state}: {self._lost}") from self._lost
        if self._core is None or self._state != "open":
            raise ClosedError(f"the engine is {self._state}")
        return self._core

    @property
    def leases(self) -> BlockLeases:
        """Which blocks of the cache its transfers hold, for what shares the cache with it (a host tier).

        Raises:
            ClosedError: It isn't open.
        """
        return self._opened().leases

    # -- transfers

    def offer(
        self,
        tid: str,
        blocks: BlockIds,
        *,
        tokens: int | None = None,
        readers: int | None = None,
        to: Sequence[str] = (),
        attempt: int = 0,
        deadline: float = 30.0,
        hold: float | None = None,
        more: bool = False,
        trace: str = "",
    ) -> Offer:
        """Offer the KV of some blocks, layer by layer as it is written.

        Nothing is taken or sent before the offer is entered (``async with``) or started.

        A reader that fails, or a deadline that passes, does not interrupt the body of the ``async
        with``, and ``Offer.layer_ready`` does not raise for it: other readers may go on, and a
        model's step is not the place to end. ``Offer.error`` tells of it at once, ``Offer.done``
        once no reader is left; it is raised where the ``async with`` is left, or by ``Offer.wait``,
        as soon as all readers have ended.

        Args:
            tid: Transfer id, issued by the router or the caller of both sides.
            blocks: Block ids in the order of the tokens; for each group a list, where the cache
                has several. They stay the engine's until the transfer is over.
            tokens: Tokens that the blocks hold; by default as many as fit.
            readers: How many engines will fetch it; by default one, or as many as ``to`` names.
            to: Control addresses of engines that are told of the offer (push). Where fewer than
                ``readers`` are named, the others come by themselves.
            attempt: Number of the attempt at this id; each attempt is a transfer of its own.
            deadline: Seconds until it must be over.
            hold: Seconds for which it waits for a reader that says nothing; None: until the deadline. One
                that says that it will come (``renew``) is waited for as long again, and one that has come
                has until the deadline.
            more: It is the beginning of something whose rest is offered apart, under ids that both sides
                know how to make; see ``Fetch.more``.
            trace: W3C trace context that travels along.

        Returns:
            The offer, not yet begun. Bad block ids and ids in use are refused when it begins.

        Raises:
            TypeError: An argument of the wrong kind; the message names it.
            ValueError: One that can't be meant (``InvalidBlocks``: what concerns blocks and tokens).
            CapacityError: More blocks than one transfer can list.
            ClosedError: The engine is not open.
        """
        core = self._opened()
        listed = block_lists(blocks, core.layout)
        room = room_of(listed, core.layout)
        if not room:
            raise InvalidBlocks("blocks is empty: there is nothing to offer")
        tokens = room if tokens is None else whole(tokens, "tokens", 1)
        if tokens > room:
            raise InvalidBlocks(f"tokens={tokens}, but the blocks have room for {room}")
        addresses = checked_addresses(to, "to")
        readers = max(1, len(addresses)) if readers is None else whole(readers, "readers", 1)
        if readers < len(addresses):
            raise ValueError(f"readers={readers}, but to names {len(addresses)} engines")
        lasts = seconds(deadline)
        held = 0 if hold is None else seconds(hold, "hold")
        offering = Offering(
            tid=checked_id(tid),
            attempt=whole(attempt, "attempt"),
            deadline=0,
            blocks=listed,
            trace=checked_trace(trace),
            tokens=tokens,
            hold=held,
            more=bool(more),
        )

        course = Course(offering)

        def begin() -> None:
            self._opened()
            offering.deadline = self._clock() + lasts
            named = _sessions(core, addresses)
            core.begin_offer(course, offering, [*named, *[None] * (readers - len(named))])

        return Offer(core, course, begin)

    def fetch(
        self,
        tid: str,
        blocks: BlockIds,
        *,
        sources: Sequence[str] | None = None,
        parts: int | None = None,
        first_token: int = 0,
        tokens: int | None = None,
        attempt: int = 0,
        deadline: float = 30.0,
        priority: int = 0,
        stream: object | None = None,
        trace: str = "",
    ) -> Fetch:
        """Fetch the KV that other engines offer under an id into blocks of this one.

        Args:
            tid: Transfer id, the same as at the producers.
            blocks: Block ids to be written, in the order of the tokens from token 0 on; for each
                group a list, where the cache has several.
            sources: Control addresses of the producers, one for each rank that holds heads which
                are needed here. None: wait until producers offer it to this engine (push).
            parts: How many producers will offer it, where ``sources`` is None; by default one.
            first_token: Tokens before this one are there already and aren't moved.
            tokens: Tokens wanted; by default as many as are offered.
            attempt: Number of the attempt at this id.
            deadline: Seconds until it must be over.
            priority: Higher goes first, among the fetches of this engine; any integer of 32 bits.
            stream: The caller's stream: nothing is written before what is enqueued on it now, and
                what is enqueued on it after ``layer`` or ``layer_ordered`` sees the result.
            trace: W3C trace context that travels along.

        Returns:
            The fetch, not yet begun. Bad block ids and ids in use are refused when it begins.

        Raises:
            TypeError: An argument of the wrong kind; the message names it.
            ValueError: One that can't be meant (``InvalidBlocks``: what concerns blocks and tokens).
            CapacityError: More blocks than one transfer can list.
            ClosedError: The engine is not open.
        """
        core = self._opened()
        listed = block_lists(blocks, core.layout)
        room = room_of(listed, core.layout)
        first, last = wanted_tokens(first_token, tokens, room)
        addresses = [] if sources is None else checked_addresses(sources, "sources")
        if sources is not None and not addresses:
            raise ValueError("sources names no engine; None waits for whoever offers")
        wanted = max(1, len(addresses)) if parts is None else whole(parts, "parts", 1)
        if addresses and wanted != len(addresses):
            raise ValueError(f"parts={wanted}, but sources names {len(addresses)} engines; leave parts out")
        adopted, lasts = self.cache.device.adopt(checked_stream(stream)), seconds(deadline)
        fetching = Fetching(
            tid=checked_id(tid),
            attempt=whole(attempt, "attempt"),
            deadline=0,
            blocks=listed,
            trace=checked_trace(trace),
            first_token=first,
            tokens=last,
            capacity=room,
            priority=checked_priority(priority),
        )

        course = FetchCourse(fetching, adopted)

        def begin() -> None:
            self._opened()
            fetching.deadline = self._clock() + lasts
            core.begin_fetch(course, fetching, _sessions(core, addresses), wanted)

        return Fetch(core, course, begin)

    def renew(self, tid: str, *, sources: Sequence[str] | None = None, attempt: int = 0) -> None:
        """Say that this engine will fetch something, though it can't yet: it is held for as long again.

        To be said again and again for as long as that is so, well before the ``hold`` of the offer is over;
        the producer's own numbers bound for how long that helps. What isn't offered yet, or not any more,
        stays as it is, and a producer that can't be reached is told nothing: ``fetch`` finds out. Never
        blocks.

        Args:
            tid: Transfer id.
            sources: Control addresses of the producers. None: those that offered it to this engine (push).
            attempt: Number of the attempt at this id.

        Raises:
            TypeError: An argument of the wrong kind; the message names it.
            ValueError: One that can't be meant.
            CapacityError: There are too many peers.
            ClosedError: The engine is not open.
        """
        core = self._opened()
        key = checked_id(tid), whole(attempt, "attempt")
        core.renew(key, _sessions(core, checked_addresses(sources or (), "sources")))

    async def wanted(self, tid: str, *, readers: int = 1, attempt: int = 0) -> int:
        """Wait until something that isn't offered yet is waited for, by all who will fetch it.

        What they ask for is then only to be offered, as much of it as there is: they take what they find,
        and come for the rest if there is ``more``. With one who asks for a certain number of ``tokens`` this
        goes on. Give it up (by cancelling) where it is offered all the same.

        Args:
            tid: Transfer id.
            readers: How many engines will fetch it.
            attempt: Number of the attempt at this id.

        Returns:
            The first token that any of them lacks.

        Raises:
            TypeError: An argument of the wrong kind; the message names it.
            ValueError: One that can't be meant.
            ClosedError: The engine is not open, or was closed meanwhile.
        """
        core = self._opened()
        return await core.wanted((checked_id(tid), whole(attempt, "attempt")), whole(readers, "readers", 1))

    def statistics(self) -> Statistics:
        """A snapshot of what this engine did and is doing; it may be taken from any thread.

        Raises:
            ClosedError: The engine was not entered yet.
        """
        if self._core is None:
            raise ClosedError("the engine was not entered yet")
        return self._core.statistics()


def _check_sayable(hello: Hello) -> None:
    """Raise ValueError if no peer could read what this engine says of itself; else they all fail, later."""
    try:
        said = encode_message(hello)
        msgspec.msgpack.decode(said, type=Hello)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"what this engine says of itself to peers can't be sent: {error}") from error
    if len(said) > MAX_FRAME - _HEADER:
        raise ValueError(f"what this engine says of itself to peers takes {len(said)} bytes of {MAX_FRAME}")


def _sessions(core: Core, addresses: Sequence[str]) -> list[Session]:
    """The sessions with the engines at some addresses; raises ValueError where two are one engine's."""
    found = [core.peers.session(canonical(address)) for address in addresses]
    if len(set(found)) != len(found):
        raise ValueError(f"two of these addresses are one engine's: {', '.join(addresses)}")
    return found


def _unread(session: Session) -> bool:
    """Whether the peer has yet to read something that was sent to it."""
    return session.phase is Phase.UP and (session.unacked > 0 or session.wants_to_send)
