"""``TransferEngine``: one rank's runtime.

It wires the pieces and owns what has to be given back: the control channel, the transports, the
peers, the transfer table, the mover, the leases. Whatever happens (a frame, a completion, a call
of the user, a timer) changes the table and asks for a turn; one turn does what the table wants
done, submits copies, sends what is to be sent and sets the timer. Turns are the only place where
that happens, so everything that came in one pass of the loop goes out together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from aiokv.control.base import Channel
from aiokv.device.base import Event
from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.engine.leases import BlockLeases, Lease
from aiokv.engine.movement import Mover
from aiokv.engine.peer import Peers
from aiokv.engine.statistics import Statistics
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import (
    AiokvError,
    CapacityError,
    ClosedError,
    DeviceError,
    InvalidBlocks,
    LocalProtocolError,
    PeerLostError,
)
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import OLDEST_VERSION, VERSION, Hello, Message
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.table import Table
from aiokv.proto.transfers import Action, ActionKind, Fetching, Offering, Part, Transfer
from aiokv.transports.base import Link, Transport

__all__ = ["Blocks", "TransferEngine"]

_log = logging.getLogger("aiokv")

#: Block ids of one transfer: a list where the cache has one group, else a list for each group.
Blocks = Sequence[int] | Sequence[Sequence[int]]

#: A timer that comes this late may have kept input waiting; that is read before any verdict.
_LATE_NS = 20_000_000
#: How long the input then gets to be read.
_READ_INPUT_S = 0.005

#: Block ids that one transfer can list: a message has to fit in a control frame.
_MOST_BLOCKS = 200_000


class TransferEngine:
    """Moves KV cache between this process and others; one for each rank.

    An async context manager: entering binds the control channel and the transports, leaving
    aborts what is going on, on both sides, and gives everything back. All methods but
    ``Offer.layer_ready`` belong to the task's own event loop thread.

    Args:
        cache: The registered memory; it must stay open while the engine is.
        bind: Address of the control channel; port 0 takes a free one.
        advertise: What peers are told instead of the bound address (containers, NAT).
        transports: Which data paths may be used, best first: names, or transports made by the
            caller. By default all that fit the cache, best first.
        settings: Timers and bounds.
        channel: A control channel made by the caller, in place of ``bind`` and ``advertise``.
        clock: Nanoseconds of the clock that leases are written in; shared by a host's processes.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        transports: Sequence[str | Transport] | None = None,
        settings: Settings | None = None,
        channel: Channel | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.cache = cache
        self._settings = settings or Settings()
        self._clock = clock
        self._channel = channel or _zmq_channel(bind, advertise)
        self._host = _host_of(bind)
        self._transports = _transports(transports)
        self._table = Table(cache.layout, self._settings)
        self._leases = BlockLeases(cache.layout)
        self._handles: dict[Transfer, Offer | Fetch] = {}
        self._held: dict[Transfer, Lease] = {}
        self._quarantined: list[Lease] = []
        self._unsure: set[Transfer] = set()  # transfers with a part that never became quiet
        #: Point on the caller's stream that a fetch's writes wait for.
        self._after: dict[Transfer, Event] = {}
        #: Producer: which accepted link a session's parts use.
        self._accepted: dict[bytes, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._announced: deque[tuple[Offer, int, Event]] = deque()
        self._address = ""
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn_wanted = False
        self._thread_woke = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._late = False
        self._ended = {"landed": 0, "failed": 0, "aborted": 0}
        self._received = self._sent = self._turns = self._lag = 0

    # -- life

    @property
    def address(self) -> str:
        """Where peers reach this engine.

        Raises:
            ClosedError: The engine was not entered yet.
        """
        if not self._address:
            raise ClosedError("the engine has no address before it is entered")
        return self._address

    @property
    def layout(self) -> CacheLayout:
        """Layout of the engine's cache."""
        return self.cache.layout

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError(f"an engine can be entered once; this one is {self._state}")
        self._state = "starting"
        self._loop = asyncio.get_running_loop()
        try:
            await self._start()
        except BaseException:
            self._state = "closed"
            await self._release()
            raise
        self._state = "open"
        return self

    async def _start(self) -> None:
        assert self._loop is not None  # noqa: S101
        started, faults = [], []
        for transport in self._transports:
            try:
                await transport.start(self.cache, self._host)
                started.append(transport)
            except (DeviceError, OSError) as error:
                faults.append(f"{transport.name}: {error}")
        if not started:
            raise DeviceError(f"no transport can serve this cache: {'; '.join(faults)}")
        for fault in faults:
            _log.debug("transport left out: %s", fault)
        self._address = await self._channel.start(self._on_frame)
        hello = Hello(
            versions=(OLDEST_VERSION, VERSION),
            address=self._address,
            layout=self.cache.layout,
            placement=self.cache.placement,
            transports={transport.name: transport.describe() for transport in started},
        )
        self._usable = {transport.name: transport for transport in started}
        self._poller = CompletionPoller(self._loop, clock=self._clock)
        self._mover = Mover(
            self._table,
            self.cache,
            self._poller,
            clock=self._clock,
            settings=self._settings,
            wake=self._wake,
            moved=self._on_moved,
            submitted=self._on_submitted,
        )
        self._peers = Peers(
            Identity(os.urandom(16), hello),
            self._channel,
            started,
            self._settings,
            clock=self._clock,
            up=self._on_up,
            message=self._on_message,
            lease=lambda _: self._mover.lease_extended(),
            ended=self._on_session_ended,
            linked=self._on_linked,
            retire=self._mover.retire,
            wake=self._wake,
        )

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
        if self._state != "open":
            return
        self._state = "closing"
        closing = asyncio.ensure_future(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        going = list(self._handles.values())
        for handle in going:
            error = ClosedError(f"transfer {handle._transfer}: its engine was closed")
            self._abort(handle._transfer, error, "closed")
        for handle in going:
            while not handle.done():
                await handle._bell.wait()
        await self._say_goodbye()
        self._state = "closed"
        await self._release()

    async def _say_goodbye(self) -> None:
        """Wait, for at most a second, until the peers have read the last messages; then say BYE."""
        waiting = [s for s in self._peers.sessions if s.phase is Phase.UP and s.unacked > 1]
        for session in waiting:
            session.ask_for_ack()
        self._wake()
        until = self._clock() + self._settings.close_ns
        while any(s.unacked > 1 and s.phase is Phase.UP for s in waiting) and self._clock() < until:
            self._goodbye = asyncio.get_running_loop().create_future()
            handle = asyncio.get_running_loop().call_later(
                max(0.001, (until - self._clock()) / 1e9), _ring, self._goodbye
            )
            await self._goodbye
            handle.cancel()
        for session in self._peers.sessions:
            self._peers.end(session, ClosedError("this engine was closed"), tell=True)

    _goodbye: asyncio.Future[None] | None = None

    async def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_peers"):
            self._peers.close()
        if hasattr(self, "_poller"):
            self._poller.close()
        for transport in self._transports:
            await transport.aclose()
        await self._channel.aclose()

    # -- what users call

    def offer(
        self,
        tid: str,
        blocks: Blocks,
        *,
        tokens: int | None = None,
        readers: int | None = None,
        to: Sequence[str] = (),
        attempt: int = 0,
        deadline: float = 30.0,
        trace: str = "",
    ) -> Offer:
        """Offer the KV of some blocks, layer by layer as it is written.

        Nothing is taken or sent before the offer is entered (``async with``) or started.

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
            trace: W3C trace context that travels along.

        Returns:
            The offer, not yet begun. Bad block ids and ids in use are refused when it begins.

        Raises:
            ValueError: An argument that can't be meant.
            ClosedError: The engine is not open.
        """
        listed = self._block_lists(blocks)
        room = self._capacity(listed)
        tokens = room if tokens is None else tokens
        if not 0 < tokens <= room:
            raise InvalidBlocks(f"{tokens} tokens don't fit blocks with room for {room}")
        readers = max(1, len(to)) if readers is None else readers
        if readers < max(1, len(to)):
            raise ValueError(f"{readers} readers, but {len(to)} engines are named")
        offering = Offering(
            tid=_checked_id(tid),
            attempt=attempt,
            deadline=self._deadline(deadline),
            blocks=listed,
            trace=trace,
            tokens=tokens,
        )
        addresses = list(to)

        def begin() -> None:
            self._check_open()
            offering.deadline = self._deadline(deadline)
            sessions: list[Session | None] = [self._peers.session(address) for address in addresses]
            sessions += [None] * (readers - len(sessions))
            self._begin(offering, offer, lambda now: self._table.producer.offer(offering, sessions, now), write=False)

        offer = Offer(self, offering, begin)
        return offer

    def fetch(
        self,
        tid: str,
        blocks: Blocks,
        *,
        sources: Sequence[str] | None = None,
        parts: int = 1,
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
            parts: How many producers will offer it, where ``sources`` is None.
            first_token: Tokens before this one are there already and aren't moved.
            tokens: Tokens wanted; by default as many as are offered.
            attempt: Number of the attempt at this id.
            deadline: Seconds until it must be over.
            priority: Higher goes first, among the fetches of this engine.
            stream: The caller's stream: nothing is written before what is enqueued on it now, and
                what is enqueued on it after ``layer`` or ``layer_ordered`` sees the result.
            trace: W3C trace context that travels along.

        Returns:
            The fetch, not yet begun. Bad block ids and ids in use are refused when it begins.

        Raises:
            ValueError: An argument that can't be meant.
            ClosedError: The engine is not open.
        """
        listed = self._block_lists(blocks)
        room = self._capacity(listed)
        if not 0 <= first_token <= (room if tokens is None else tokens) <= room:
            raise InvalidBlocks(f"tokens {first_token}..{tokens} don't fit blocks with room for {room}")
        if sources is not None and (not sources or len(set(sources)) != len(sources)):
            raise ValueError(f"sources must name each producer once: {list(sources)}")
        if parts < 1:
            raise ValueError("a fetch has at least one part")
        fetching = Fetching(
            tid=_checked_id(tid),
            attempt=attempt,
            deadline=self._deadline(deadline),
            blocks=listed,
            trace=trace,
            first_token=first_token,
            tokens=-1 if tokens is None else tokens,
            capacity=room,
            priority=priority,
        )
        addresses = list(sources or ())
        adopted = self.cache.device.adopt(stream)

        def begin() -> None:
            self._check_open()
            fetching.deadline = self._deadline(deadline)
            sessions = [self._peers.session(address) for address in addresses]
            self._after[fetching] = adopted.record()
            try:
                self._begin(
                    fetching, fetch, lambda now: self._table.consumer.fetch(fetching, sessions, parts, now), write=True
                )
            except BaseException:
                del self._after[fetching]
                raise

        fetch = Fetch(self, fetching, begin, adopted)
        return fetch

    def statistics(self) -> Statistics:
        """A snapshot of what this engine did and is doing."""
        opened = self._state in ("open", "closing")
        return Statistics(
            bytes_received=self._received,
            bytes_sent=self._sent,
            parts_ended=dict(self._ended),
            offers=self._table.count("producer"),
            fetches=self._table.count("consumer"),
            parts=len(self._table.ledger.parts),
            parked=len(self._table.waiting),
            leases=self._leases.out,
            blocks_held=self._leases.held(),
            quarantined=len(self._quarantined),
            in_flight=self._mover.in_flight if opened else 0,
            sessions=len(self._peers.sessions) if opened else 0,
            sessions_lost=self._peers.sessions_lost if opened else 0,
            frames_sent=self._peers.frames_sent if opened else 0,
            frames_received=self._peers.frames_received if opened else 0,
            frames_stray=self._peers.frames_stray if opened else 0,
            turns=self._turns,
            loop_lag_max=self._lag / 1e9,
        )

    # -- checking arguments

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClosedError(f"the engine is {self._state}")

    def _deadline(self, seconds: float) -> int:
        if not 0 < seconds < 86_400:
            raise ValueError(f"a deadline lies between 0 s and a day, not {seconds}")
        return self._clock() + int(seconds * SECOND)

    def _block_lists(self, blocks: Blocks) -> tuple[GroupBlocks, ...]:
        groups = len(self.layout.groups)
        lists = [blocks] if groups == 1 and not _nested(blocks) else list(blocks)
        if len(lists) != groups:
            raise InvalidBlocks(f"block lists for {len(lists)} groups, the cache has {groups}")
        found = []
        for ids in lists:
            array = np.asarray(ids)
            if array.size and array.dtype.kind not in "iu":
                raise InvalidBlocks(f"block ids are integers, not {array.dtype}")
            found.append(GroupBlocks(start=0, ids=array.astype(np.int64).reshape(-1)))
        if sum(each.ids.size for each in found) > _MOST_BLOCKS:
            raise CapacityError(f"a transfer lists at most {_MOST_BLOCKS} blocks")
        return tuple(found)

    def _capacity(self, blocks: tuple[GroupBlocks, ...]) -> int:
        """Tokens that the blocks have room for, in each group that keeps one entry a token."""
        rooms = [
            listed.start + listed.ids.size * group.block_size
            for listed, group in zip(blocks, self.layout.groups, strict=True)
            if group.kind != "state"
        ]
        return min(rooms, default=1)

    def _begin(
        self,
        transfer: Transfer,
        handle: Offer | Fetch,
        register: Callable[[int], None],
        *,
        write: bool,
    ) -> None:
        lease = self._leases.take(transfer.blocks, write=write)
        try:
            register(self._clock())
        except BaseException:
            lease.give_back()
            raise
        self._held[transfer] = lease
        self._handles[transfer] = handle
        self._wake()

    # -- called by offers and fetches

    def _explain(self, part: Part) -> str:
        return self._table.ledger.explain(part, self._clock())

    def _abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        self._table.abort(transfer, error, reason)
        self._wake()

    def _layer_ready(self, offer: Offer, layer: int, stream: object | None) -> None:
        """From any thread: note a layer, and wake the loop once for all that are noted by then."""
        if not 0 <= layer < self.layout.layers:
            raise IndexError(f"layer {layer} is not one of 0..{self.layout.layers - 1}")
        if offer._transfer.resolved:
            return
        offer._announce(layer)
        event = self.cache.device.adopt(stream).record()
        self._announced.append((offer, layer, event))
        if self._loop is not None and not self._thread_woke:
            self._thread_woke = True
            try:
                self._loop.call_soon_threadsafe(self._on_announced)
            except RuntimeError:  # the loop is closed, and the transfer with it
                return

    def _on_announced(self) -> None:
        # The flag falls first: what is noted after this line wakes the loop again.
        self._thread_woke = False
        ready: dict[Offer, int] = {}
        while self._announced:
            offer, layer, event = self._announced.popleft()
            try:
                done = event.done()
            except DeviceError as error:
                self._abort(offer._transfer, error, "failed")
                continue
            if done:
                ready[offer] = ready.get(offer, 0) | 1 << layer
            elif self._state == "open":
                self._watch_ready(offer, layer, event)
        for offer, mask in ready.items():
            self._ready(offer, mask)

    def _watch_ready(self, offer: Offer, layer: int, event: Event) -> None:
        def done(error: DeviceError | None) -> None:
            if error is not None:
                self._abort(offer._transfer, error, "failed")
            else:
                self._ready(offer, 1 << layer)

        self._poller.watch(event, event, done)

    def _ready(self, offer: Offer, mask: int) -> None:
        self._table.producer.layers_ready(offer._transfer, mask)
        offer._changed()
        self._wake()

    def _all_ready(self, offer: Offer) -> None:
        """The body of an offer was left: the layers that it did not announce are written, too."""
        for layer in range(self.layout.layers):
            if not offer._announced >> layer & 1:
                self._layer_ready(offer, layer, None)

    # -- what comes from below

    def _on_frame(self, data: bytes) -> None:
        if self._state in ("open", "closing"):
            self._peers.receive(data)
            if self._goodbye is not None:
                _ring(self._goodbye)

    def _on_message(self, session: Session, message: Message) -> None:
        self._table.receive(session, message, self._clock())

    def _on_up(self, session: Session) -> None:
        for part in self._table.parts_of(session):
            self._connect(part)

    def _on_session_ended(self, session: Session, error: AiokvError, certain: bool) -> None:
        self._table.lost(session, error, certain=certain)
        self._accepted = {link: owner for link, owner in self._accepted.items() if owner is not session}

    def _on_linked(self, session: Session, error: AiokvError | None) -> None:
        now = self._clock()
        peer = self._peers.peer_of(session)
        for part in self._table.parts_of(session):
            if part.role != "consumer" or part.linked:
                continue
            if error is not None:
                self._table.fail(part, error)
            elif peer is not None and peer.link is not None and peer.transport is not None:
                name, one_sided = peer.transport.name, peer.transport.one_sided
                self._table.consumer.connected(part, now, name, peer.link.id, one_sided=one_sided)

    def _on_moved(self, part: Part, nbytes: int) -> None:
        handle = self._handles.get(part.transfer)
        if handle is not None:
            handle.bytes_moved += nbytes
            handle._changed()
        if part.role == "consumer":
            self._received += nbytes
        else:
            self._sent += nbytes

    def _on_submitted(self, part: Part, layer: int, event: Event) -> None:
        handle = self._handles.get(part.transfer)
        if isinstance(handle, Fetch):
            handle._note_submitted(part, layer, event)

    # -- one turn

    def _wake(self) -> None:
        """Ask for a turn; however often it is asked, the next pass of the loop has one."""
        if not self._turn_wanted and self._loop is not None:
            self._turn_wanted = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_wanted = False
        if self._state not in ("open", "closing"):
            return
        self._turns += 1
        self._act()
        if self._mover.submit():
            self._wake()
        self._act()
        self._table.producer.flush()
        self._peers.flush()
        self._act()
        self._set_timer()

    def _act(self) -> None:
        """Do what the table wants done, also what comes of doing it."""
        actions = self._table.actions
        while actions:
            pending, actions[:] = actions[:], []
            for action in pending:
                self._do(action)

    def _do(self, action: Action) -> None:
        part = action.part
        match action.kind:
            case ActionKind.CONNECT:
                self._connect(part)
            case ActionKind.START:
                self._start_part(part)
            case ActionKind.MOVE:
                self._mover.move(part, action.mask)
            case ActionKind.STOP:
                self._mover.stop(part)
            case ActionKind.QUARANTINE:
                self._unsure.add(part.transfer)
            case ActionKind.ENDED:
                self._ended[part.state.value] += 1
                self._mover.forget(part)
                self._changed(part.transfer)
            case ActionKind.RESOLVED:
                self._resolve(part.transfer)

    def _connect(self, part: Part) -> None:
        session = part.session
        if session is None or session.phase is not Phase.UP or part.ended:
            return
        if part.role == "producer":
            self._table.producer.connected(part, self._clock())
        else:
            self._peers.open_link(session, self._tasks)

    def _start_part(self, part: Part) -> None:
        if part.ended or part.session is None:
            return
        try:
            link = self._link_of(part)
            if part.role == "consumer" or not part.one_sided:
                total = self._mover.start(part, link, self._after.get(part.transfer))
                handle = self._handles.get(part.transfer)
                if handle is not None:
                    handle.bytes_total += total
        except (AiokvError, ValueError) as error:
            failure = error if isinstance(error, AiokvError) else InvalidBlocks(str(error))
            self._table.fail(part, failure)
            return
        if part.role == "producer":
            self._table.producer.accept(part, self._clock())

    def _link_of(self, part: Part) -> Link:
        session = part.session
        assert session is not None  # noqa: S101
        if part.role == "consumer":
            peer = self._peers.peer_of(session)
            if peer is None or peer.link is None:
                raise PeerLostError(f"{part}: the link is gone")
            return peer.link
        transport = self._usable.get(part.link)
        link = transport.accepted(part.link_id) if transport is not None else None
        if transport is None or link is None or link.lost:
            raise PeerLostError(f"{part}: there is no such {part.link} link")
        if transport.one_sided is not part.one_sided:
            raise PeerLostError(f"{part}: a grant over {part.link} with the wrong kind of block list")
        if part.link_id not in self._accepted:
            self._accepted[part.link_id] = session
            link.on_lost(lambda: self._accepted_lost(part.link, part.link_id, link))
        return link

    def _accepted_lost(self, name: str, link_id: bytes, link: Link) -> None:
        session = self._accepted.pop(link_id, None)
        if session is not None:
            self._peers.link_lost(session, f"the {name} link from {session.address} is lost")
        self._mover.retire(link)

    def _changed(self, transfer: Transfer) -> None:
        handle = self._handles.get(transfer)
        if handle is not None:
            handle._changed()

    def _resolve(self, transfer: Transfer) -> None:
        """All parts ended: the blocks are the caller's again, and whoever waits may know."""
        lease = self._held.pop(transfer)
        if transfer in self._unsure:
            self._unsure.discard(transfer)
            self._quarantined.append(lease)
        else:
            lease.give_back()
        self._after.pop(transfer, None)
        handle = self._handles.pop(transfer)
        handle._changed()

    # -- time

    def _set_timer(self) -> None:
        timers = [when for when in (self._table.next_timer(), self._peers.next_timer()) if when is not None]
        when = min(timers, default=0)
        if when == self._timer_at and (self._timer is not None or not when):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = when
        if when and self._loop is not None:
            # Rounded up to whole milliseconds: a timer that fires early would only be set again.
            delay = max(0, -(-(when - self._clock()) // 1_000_000)) / 1000
            self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now = self._clock()
        late, self._timer = now - self._timer_at, None
        self._lag = max(self._lag, late)
        if late > _LATE_NS and not self._late and self._loop is not None:
            # The loop was held, or the process stopped. What peers said meanwhile lies unread; it
            # is read before anybody is judged by the clock.
            self._late = True
            if late > self._settings.liveness_ns // 3:
                self._peers.forgive(now)
            self._timer = self._loop.call_later(_READ_INPUT_S, self._on_timer)
            return
        self._late = False
        self._timer_at = 0
        self._table.handle_timer(now)
        self._peers.handle_timer(now)
        self._wake()


def _ring(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _nested(blocks: Blocks) -> bool:
    return len(blocks) > 0 and not isinstance(blocks[0], int | np.integer)


def _checked_id(tid: str) -> str:
    if not isinstance(tid, str) or not 0 < len(tid) <= 256:
        raise ValueError(f"a transfer id is a string of 1 to 256 characters, not {tid!r}")
    return tid


def _host_of(address: str) -> str:
    """Host part of a control address, for the data ports; loopback where it has none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]") if address.startswith("tcp://") and port else "127.0.0.1"


def _zmq_channel(bind: str, advertise: str | None) -> Channel:
    # Imported here, so that importing aiokv doesn't import zmq.
    from aiokv.control.zmq import ZmqChannel

    return ZmqChannel(bind, advertise=advertise)


def _transports(wanted: Sequence[str | Transport] | None) -> list[Transport]:
    """The transports by name or object, best first."""
    made = []
    for each in ("shm", "cma", "tcp") if wanted is None else wanted:
        made.append(_make(each) if isinstance(each, str) else each)
    if not made:
        raise ValueError("at least one transport must be allowed")
    return made


def _make(name: str) -> Transport:
    """The transport of that name; only its own module is imported."""
    match name:
        case "shm":
            from aiokv.transports.shm import ShmTransport

            return ShmTransport()
        case "cma":
            from aiokv.transports.cma import CmaTransport

            return CmaTransport()
        case "tcp":
            from aiokv.transports.tcp import TcpTransport

            return TcpTransport()
    raise ValueError(f"there is no transport {name!r}; there are shm, cma, tcp")
