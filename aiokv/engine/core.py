"""The pump: where the transfer table, the peers and the data plane meet.

Whatever happens (a frame, a completion, a call of the user, a timer) changes the table and asks
for a turn. One turn does what the table wants done, submits copies, sends what is to be sent and
sets the timer. Turns are the only place where that happens, so everything that came in one pass
of the loop goes out together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from aiokv.control.base import Channel
from aiokv.device.base import Event, Stream
from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.engine.leases import BlockLeases, Lease
from aiokv.engine.mover import Mover
from aiokv.engine.peer import Peers
from aiokv.engine.statistics import Statistics
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError, DeviceError, InvalidBlocks, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Message
from aiokv.proto.parts import State
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import Settings
from aiokv.proto.table import Table
from aiokv.proto.transfers import Action, ActionKind, Fetching, Offering, Part, Transfer
from aiokv.transports.base import Link, Transport

__all__ = ["Core"]

#: A timer that comes this late may have kept input waiting; that is read before any verdict.
_LATE_NS = 20_000_000
#: How long the input then gets to be read.
_READ_INPUT_NS = 5_000_000


class Core:
    """The working parts of one open engine. Belongs to its loop's thread, but for ``layer_ready``.

    Args:
        me: Who this engine is.
        cache: The registered memory.
        channel: The control channel, started; its frames go to ``on_frame``.
        transports: The transports that can be used, best first, started.
        settings: Timers and bounds.
        clock: The time (ns).
    """

    def __init__(
        self,
        me: Identity,
        cache: KVCache,
        channel: Channel,
        transports: Sequence[Transport],
        settings: Settings,
        clock: Callable[[], int],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.cache = cache
        self.settings = settings
        self.clock = clock
        self.table = Table(cache.layout, settings)
        self.leases = BlockLeases(cache.layout)
        self.poller = CompletionPoller(self.loop, clock=clock)
        self.mover = Mover(
            self.table,
            cache,
            self.poller,
            clock=clock,
            settings=settings,
            wake=self.wake,
            moved=self._on_moved,
            submitted=self._on_submitted,
        )
        self.peers = Peers(
            me,
            channel,
            transports,
            settings,
            clock=clock,
            up=self._on_up,
            message=self._on_message,
            lease=self.mover.lease_extended,
            ended=self._on_session_ended,
            linked=self._on_linked,
            retire=self.mover.retire,
            wake=self.wake,
        )
        self._transports = {transport.name: transport for transport in transports}
        #: What the caller holds of each transfer, and the blocks that the transfer holds.
        self._handles: dict[Transfer, Offer | Fetch] = {}
        self._held: dict[Transfer, Lease] = {}
        #: Point on the caller's stream that a fetch's writes wait for.
        self._after: dict[Transfer, Event] = {}
        #: Transfers with a part that never became quiet, and the leases of those that ended so.
        self._unsure: set[Transfer] = set()
        self._quarantined: list[Lease] = []
        #: Producer: whose parts use an accepted link.
        self._accepted: dict[bytes, tuple[Session, Link]] = {}
        #: Layers said to be ready, by any thread, that the loop has not looked at yet.
        self._announced: deque[tuple[Offer, int, Stream, Event]] = deque()
        self._announced_woke = False
        self._turn_wanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        #: Until when input is read after a timer that came late; 0 where none did (ns).
        self._reading_until = 0
        self._closed = False
        self._ended = dict.fromkeys((State.LANDED.value, State.FAILED.value, State.ABORTED.value), 0)
        self._received = self._sent = self._turns = self._lag = 0

    @property
    def layout(self) -> CacheLayout:
        """Layout of the engine's cache."""
        return self.cache.layout

    @property
    def handles(self) -> list[Offer | Fetch]:
        """Transfers that are not over."""
        return list(self._handles.values())

    def close(self) -> None:
        """Stop: no turn and no callback comes any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.peers.close()
        self.poller.close()

    # -- calls of the user

    def begin_offer(self, offer: Offer, offering: Offering, sessions: Sequence[Session | None]) -> None:
        """Take the blocks and register the offer; nothing is taken if that fails."""
        lease = self.leases.take(offering.blocks, write=False)
        try:
            self.table.producer.offer(offering, sessions, self.clock())
        except BaseException:
            lease.give_back()
            raise
        self._begun(offering, offer, lease)

    def begin_fetch(self, fetch: Fetch, fetching: Fetching, sources: Sequence[Session], parts: int) -> None:
        """Take the blocks and register the fetch; nothing is taken if that fails."""
        after = fetch.stream.record()  # it may raise, so before anything is taken
        lease = self.leases.take(_written(fetching, self.layout), write=True)
        try:
            self.table.consumer.fetch(fetching, sources, parts, self.clock())
        except BaseException:
            lease.give_back()
            raise
        self._after[fetching] = after
        self._begun(fetching, fetch, lease)

    def _begun(self, transfer: Transfer, handle: Offer | Fetch, lease: Lease) -> None:
        self._held[transfer] = lease
        self._handles[transfer] = handle
        self.wake()

    def abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        """Give a transfer up on both sides."""
        self.table.abort(transfer, error, reason)
        self.wake()

    def explain(self, part: Part) -> str:
        """What a part waits for, in words."""
        return self.table.ledger.explain(part, self.clock())

    def layer_ready(self, offer: Offer, layer: int, stream: object | None) -> None:
        """From any thread: note a layer, and wake the loop once for all that are noted by then."""
        adopted = self.cache.device.adopt(stream)
        self._announced.append((offer, layer, adopted, adopted.record()))
        if not self._announced_woke:
            self._announced_woke = True
            try:
                self.loop.call_soon_threadsafe(self._on_announced)
            except RuntimeError:  # the loop is closed, and the transfer with it
                return

    def _on_announced(self) -> None:
        # The flag falls first: what is noted after this line wakes the loop again.
        self._announced_woke = False
        ready: dict[Offer, int] = {}
        while self._announced:
            offer, layer, stream, event = self._announced.popleft()
            if self._closed or offer.done():
                continue
            try:
                done = event.done()
            except DeviceError as error:
                self.abort(offer.transfer, error, "failed")
                continue
            if done:
                ready[offer] = ready.get(offer, 0) | 1 << layer
            else:
                self._watch_ready(offer, layer, stream, event)
        for offer, mask in ready.items():
            self._ready(offer, mask)

    def _watch_ready(self, offer: Offer, layer: int, stream: Stream, event: Event) -> None:
        def done(error: DeviceError | None) -> None:
            if error is not None:
                self.abort(offer.transfer, error, "failed")
            else:
                self._ready(offer, 1 << layer)

        self.poller.watch(event, stream, done)

    def _ready(self, offer: Offer, mask: int) -> None:
        self.table.producer.layers_ready(offer.transfer, mask)
        offer.changed()
        self.wake()

    # -- what comes from the peers

    def _on_message(self, session: Session, message: Message) -> None:
        self.table.receive(session, message, self.clock())

    def _on_up(self, session: Session) -> None:
        for part in self.table.parts_of(session):
            self._connect(part)

    def _on_session_ended(self, session: Session, error: AiokvError, certain: bool) -> None:
        self.table.lost(session, error, certain=certain)
        # What it was to be sent is read no more, and who could still read here is told.
        for owner, link in list(self._accepted.values()):
            if owner is session:
                link.close()

    def _on_linked(self, session: Session, error: AiokvError | None) -> None:
        for part in self.table.parts_of(session):
            if part.role != "consumer" or part.linked:
                continue
            if error is not None:
                self.table.fail(part, error)
            else:
                self._connect(part)

    # -- what comes from the data plane

    def _on_moved(self, part: Part, nbytes: int, layer_through: bool) -> None:
        handle = self._handles.get(part.transfer)
        if handle is not None:
            handle.bytes_moved += nbytes
            if layer_through:  # nobody waits for less
                handle.changed()
        if part.role == "consumer":
            self._received += nbytes
        else:
            self._sent += nbytes

    def _on_submitted(self, part: Part, layer: int, event: Event) -> None:
        handle = self._handles.get(part.transfer)
        if isinstance(handle, Fetch):
            handle.submitted(part, layer, event)

    # -- one turn

    def wake(self) -> None:
        """Ask for a turn; however often it is asked, the next pass of the loop has one."""
        if not self._turn_wanted and not self._closed:
            self._turn_wanted = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_wanted = False
        if self._closed:
            return
        self._turns += 1
        try:
            self._act()
            if self.mover.submit():
                self.wake()
            self._act()
            self.table.producer.flush()
            self.peers.flush()
            self._act()
        finally:
            self._set_timer()  # whatever happens: deadlines hold

    def _act(self) -> None:
        """Do what the table wants done, also what comes of doing it."""
        actions = self.table.actions
        while actions:
            pending, actions[:] = actions[:], []
            for action in pending:
                try:
                    self._do(action)
                except Exception as error:  # noqa: BLE001 - a fault in one transfer stops no other
                    what = f"{action.kind.value} of {action.part} failed"
                    self.loop.call_exception_handler({"message": f"aiokv: {what}", "exception": error})
                    self.table.fail(action.part, DeviceError(f"{what}: {error!r}"))

    def _do(self, action: Action) -> None:
        part = action.part
        match action.kind:
            case ActionKind.CONNECT:
                self._connect(part)
            case ActionKind.START:
                self._start(part)
            case ActionKind.MOVE:
                self.mover.move(part, action.mask)
            case ActionKind.STOP:
                peer = self.peers.peer_of(part.session) if part.session is not None else None
                self.mover.stop(part, peer.link if peer is not None else None)
                self._handles[part.transfer].changed()  # who waits for a layer waits in vain
            case ActionKind.CUT:
                self.mover.cut(part)
            case ActionKind.QUARANTINE:
                self._unsure.add(part.transfer)
            case ActionKind.ENDED:
                self._ended[part.state.value] += 1
                self.mover.forget(part)
                self._handles[part.transfer].changed()
            case ActionKind.RESOLVED:
                self._resolve(part.transfer)

    def _connect(self, part: Part) -> None:
        session = part.session
        if session is None or session.phase is not Phase.UP or part.ended:
            return
        if part.role == "producer":
            self.table.producer.connected(part, self.clock())
            return
        peer = self.peers.peer_of(session)
        if peer is not None and peer.link is not None and peer.transport is not None:
            name, one_sided = peer.transport.name, peer.transport.one_sided
            self.table.consumer.connected(part, self.clock(), name, peer.link.id, one_sided=one_sided)
        else:
            self.peers.open_link(session)

    def _start(self, part: Part) -> None:
        if part.state is not State.GRANTED and part.state is not State.MOVING:
            return
        try:
            link = self._link_of(part)
            if part.role == "consumer" or not part.one_sided:
                self._handles[part.transfer].bytes_total += self.mover.start(
                    part, link, self._after.get(part.transfer)
                )
        except (AiokvError, ValueError) as error:
            self.table.fail(part, error if isinstance(error, AiokvError) else InvalidBlocks(str(error)))
            return
        if part.role == "producer":
            self.table.producer.accept(part, self.clock())

    def _link_of(self, part: Part) -> Link:
        """The link that a part's bytes take, at this end."""
        session = part.session
        peer = self.peers.peer_of(session) if session is not None else None
        if session is None or peer is None:
            raise PeerLostError(f"{part}: the session is gone")
        if part.role == "consumer":
            if peer.link is None:
                raise PeerLostError(f"{part}: the link is gone")
            return peer.link
        transport = self._transports.get(part.link)
        link = transport.accepted(part.link_id) if transport is not None else None
        if transport is None or link is None or link.lost:
            raise PeerLostError(f"{part}: there is no such {part.link} link")
        if transport.one_sided is not part.one_sided:
            raise PeerLostError(f"{part}: the grant's block list doesn't fit {part.link}")
        owner, _ = self._accepted.get(part.link_id, (session, link))
        if part.link_id not in self._accepted:
            self._accepted[part.link_id] = session, link
            link.on_lost(lambda: self._accepted_lost(part.link, part.link_id, link))
        elif owner is not session:
            raise PeerLostError(f"{part}: the {part.link} link belongs to another session")
        return link

    def _accepted_lost(self, name: str, link_id: bytes, link: Link) -> None:
        session, _ = self._accepted.pop(link_id)
        if not self._closed:
            text = f"the {name} link from {session.address} is lost"
            self.peers.link_lost(session, text, certain=True)
            self.mover.retire(link)

    def _resolve(self, transfer: Transfer) -> None:
        """All parts ended: the blocks are the caller's again, and whoever waits may know."""
        lease = self._held.pop(transfer)
        if transfer in self._unsure:
            self._unsure.discard(transfer)
            self._quarantined.append(lease)
        else:
            lease.give_back()
        self._after.pop(transfer, None)
        self._handles.pop(transfer).over()

    # -- time

    def _set_timer(self) -> None:
        timers = (self.table.next_timer(), self.peers.next_timer())
        wanted = min((each for each in timers if each is not None), default=None)
        now = self.clock()
        if self._timer is not None:
            if wanted is not None and (wanted == self._timer_at or self._timer_at <= now):
                return  # it is set for then, or due already and sees to all that is
            self._timer.cancel()
            self._timer, self._reading_until = None, 0
        if wanted is not None:
            # 0 is as soon as possible: due now, and not late.
            self._timer_at = wanted or now
            # Rounded up to whole milliseconds: a timer that fires early would only be set again.
            delay = max(0, -(-(self._timer_at - now) // 1_000_000)) / 1000
            self._timer = self.loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now, first = self.clock(), not self._reading_until
        late, self._timer = now - (self._reading_until or self._timer_at), None
        self._lag = max(self._lag, late)
        if late > self.settings.liveness_ns // 3:
            self.peers.forgive(now)
        if late > _LATE_NS and first:
            # The loop was held, or the process stopped. What peers said meanwhile lies unread; it
            # is read before anybody is judged by the clock.
            self._reading_until = now + _READ_INPUT_NS
            self._timer = self.loop.call_later(_READ_INPUT_NS / 1e9, self._on_timer)
            return
        self._reading_until = 0
        self.table.handle_timer(now)
        self.peers.handle_timer(now)
        self.wake()

    # -- for people

    def statistics(self) -> Statistics:
        """A snapshot."""
        return Statistics(
            bytes_received=self._received,
            bytes_sent=self._sent,
            parts_ended=dict(self._ended),
            offers=self.table.count("producer"),
            fetches=self.table.count("consumer"),
            parts=len(self.table.ledger.parts),
            parked=len(self.table.waiting),
            leases=self.leases.out,
            blocks_held=self.leases.held(),
            quarantined=len(self._quarantined),
            in_flight=self.mover.in_flight,
            sessions=len(self.peers.sessions),
            sessions_lost=self.peers.sessions_lost,
            frames_sent=self.peers.frames_sent,
            frames_received=self.peers.frames_received,
            frames_stray=self.peers.frames_stray,
            turns=self._turns,
            loop_lag_max=self._lag / 1e9,
        )


def _written(fetching: Fetching, layout: CacheLayout) -> list[GroupBlocks]:
    """The blocks that a fetch writes: not those that hold only tokens which are there already."""
    written = []
    for listed, group in zip(fetching.blocks, layout.groups, strict=True):
        skipped = (
            0 if group.kind == "state" else max(0, fetching.first_token - listed.start) // group.block_size
        )
        start = listed.start + skipped * group.block_size
        written.append(GroupBlocks(start=start, ids=listed.ids[skipped:]))
    return written
