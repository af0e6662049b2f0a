"""The pump: where the transfer table, the peers and the data plane meet.

Whatever happens (a frame, a completion, a call of the user, a timer) changes the table and asks
for a turn. One turn does what the table wants done, submits copies, sends what is to be sent and
sets the timer. Turns are the only place where that happens, so everything that came in one pass
of the loop goes out together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from aiokv.control.base import Channel
from aiokv.device.base import Event
from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.engine.accepted import AcceptedLinks
from aiokv.engine.alarm import Alarm
from aiokv.engine.announcements import Announcements
from aiokv.engine.bell import Bell
from aiokv.engine.course import Course, FetchCourse
from aiokv.engine.demultiplexer import Demultiplexer
from aiokv.engine.leases import BlockLeases, Lease, written
from aiokv.engine.mover import Mover
from aiokv.engine.peer import Peers
from aiokv.engine.statistics import Statistics
from aiokv.engine.stopwatch import Stopwatch, Track
from aiokv.errors import AiokvError, ClosedError, DeviceError, InvalidBlocks, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Message
from aiokv.proto.parts import State
from aiokv.proto.plan import planned_bytes
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import Settings
from aiokv.proto.table import Table
from aiokv.proto.transfers import Action, ActionKind, Fetching, Key, Offering, Part, Transfer
from aiokv.transports.base import Link, Transport

__all__ = ["Core"]


class Core:
    """The working parts of one open engine. Belongs to its loop's thread, but for ``layer_ready``.

    Args:
        me: Who this engine is.
        cache: The registered memory.
        channel: The control channel, started; its frames go to ``demultiplexer.receive``.
        transports: The transports that can be used, best first, started.
        settings: Timers and bounds.
        clock: The time (ns).
        track: Is told of every step of every part; None: nobody is.
    """

    def __init__(
        self,
        me: Identity,
        cache: KVCache,
        channel: Channel,
        transports: Sequence[Transport],
        settings: Settings,
        clock: Callable[[], int],
        track: Track | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.cache = cache
        self.settings = settings
        self.clock = clock
        self.table = Table(cache.layout, settings)
        self._stopwatch = Stopwatch(clock, track)
        self.table.ledger.stepped = self._stopwatch.stepped
        self.table.waiting.came = self._on_came
        self.leases = BlockLeases(cache.layout)
        guard = getattr(cache.device, "quiet", None)
        self.poller = CompletionPoller(self.loop, clock=clock, guard=guard)
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
            ended=self._on_session_ended,
            linked=self._on_linked,
            retire=self.mover.retire,
            wake=self.wake,
        )
        self.demultiplexer = Demultiplexer(
            me,
            self.peers,
            clock=clock,
            up=self._on_up,
            message=self._on_message,
            lease=self.mover.lease_extended,
            wake=self.wake,
        )
        self._accepted = AcceptedLinks(transports, self._on_accepted_lost)
        self._announced = Announcements(
            self.loop, cache.device, self.poller, ready=self._on_ready, failed=self._on_never_ready
        )
        self._alarm = Alarm(
            self.loop,
            clock,
            patience_ns=settings.liveness_ns // 3,
            late=self.peers.forgive,
            due=self._on_time,
        )
        #: Transfers that are not over.
        self._courses: dict[Transfer, Course] = {}
        #: Who waits until something is asked for that isn't offered yet.
        self._watching: dict[Key, list[Bell]] = {}
        #: Leases of transfers that ended without being quiet.
        self._quarantined: list[Lease] = []
        self._turn_wanted = False
        self._closed = False
        self._ended = dict.fromkeys((State.LANDED.value, State.FAILED.value, State.ABORTED.value), 0)
        self._received: Counter[str] = Counter()  # bytes, by transport
        self._sent: Counter[str] = Counter()
        self._turns = 0

    @property
    def layout(self) -> CacheLayout:
        """Layout of the engine's cache."""
        return self.cache.layout

    @property
    def courses(self) -> list[Course]:
        """Transfers that are not over."""
        return list(self._courses.values())

    @property
    def quarantined(self) -> int:
        """Blocks that something may still touch, for all that is known."""
        return sum(lease.blocks for lease in list(self._quarantined))

    def close(self) -> None:
        """Stop: no turn and no callback comes any more."""
        self._closed = True
        for key in self._watching:
            self._on_came(key)
        self._alarm.cancel()
        self._announced.close()
        self.peers.close()
        self.poller.close()

    # -- calls of the user

    def begin_offer(self, course: Course, offering: Offering, sessions: Sequence[Session | None]) -> None:
        """Take the blocks and register the offer; nothing is taken if that fails."""
        lease = self.leases.take(offering.blocks, write=False)
        try:
            self.table.producer.offer(offering, sessions, self.clock())
        except BaseException:
            lease.give_back()
            raise
        self._begun(offering, course, lease)

    def begin_fetch(
        self, course: FetchCourse, fetching: Fetching, sources: Sequence[Session], parts: int
    ) -> None:
        """Take the blocks and register the fetch; nothing is taken if that fails."""
        after = course.stream.record()  # it may raise, so before anything is taken
        lease = self.leases.take(written(fetching, self.layout), write=True)
        try:
            self.table.consumer.fetch(fetching, sources, parts, self.clock())
        except BaseException:
            lease.give_back()
            raise
        course.after = after
        self._begun(fetching, course, lease)

    def _begun(self, transfer: Transfer, course: Course, lease: Lease) -> None:
        course.lease = lease
        self._courses[transfer] = course
        self.wake()

    def renew(self, key: Key, sources: Sequence[Session]) -> None:
        """Say to the sources, or to whoever offered it here, that a transfer will be fetched."""
        for session in sources or self.table.waiting.sessions(key, "producer"):
            session.renew(key)
        self.wake()

    async def wanted(self, key: Key, readers: int) -> int:
        """Wait until all readers of something wait for it; gives from which token on they do."""
        bell = Bell()
        self._watching.setdefault(key, []).append(bell)
        try:
            while not self._closed:
                first = self.table.waiting.wanted(key, readers)
                if first >= 0:
                    return first
                await bell.wait()
            raise ClosedError(f"transfer {key[0]!r}: the engine was closed before it was asked for")
        finally:
            self._watching[key].remove(bell)
            if not self._watching[key]:
                del self._watching[key]

    def _on_came(self, key: Key) -> None:
        for bell in self._watching.get(key, ()):
            bell.ring()

    def abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        """Give a transfer up on both sides."""
        self.table.abort(transfer, error, reason)
        self.wake()

    def explain(self, part: Part) -> str:
        """What a part waits for, in words."""
        return self.table.ledger.explain(part, self.clock())

    def woke(self, transfer: Transfer) -> None:
        """A task that waited for the end of a transfer runs again."""
        self._stopwatch.woke(transfer)

    def layer_ready(self, course: Course, layer: int, stream: object | None) -> None:
        """From any thread: a layer is written, as of what is enqueued on the stream."""
        self._announced.add(course, layer, stream)

    # -- what comes from the peers

    def _on_message(self, session: Session, message: Message) -> None:
        self.table.receive(session, message, self.clock())

    def _on_up(self, session: Session) -> None:
        for part in self.table.parts_of(session):
            self._connect(part)

    def _on_session_ended(self, session: Session, error: AiokvError, certain: bool) -> None:
        self.table.lost(session, error, certain=certain)
        self._accepted.close(session)

    def _on_linked(self, session: Session, error: AiokvError | None) -> None:
        for part in self.table.parts_of(session):
            if part.role != "consumer" or part.linked:
                continue
            if error is not None:
                self.table.fail(part, error)
            else:
                self._connect(part)
        if error is not None and not session.live and not session.parked:
            # Where nobody lets us in another one may live by now: the next attempt asks who it is.
            self.peers.end(session, error, tell=True)

    # -- what comes from the data plane

    def _on_moved(self, part: Part, layers: Sequence[int], nbytes: int, through: int) -> None:
        course = self._courses.get(part.transfer)
        if course is not None:
            course.bytes_moved += len(layers) * nbytes
            if through:  # nobody waits for less than a layer
                course.changed()
        self._stopwatch.moved(part, layers, nbytes, through)
        (self._received if part.role == "consumer" else self._sent)[part.link] += len(layers) * nbytes

    def _on_read(self, part: Part) -> None:
        """A reader confirmed that all of its part is in place."""
        nbytes = self._readable(part)
        self._courses[part.transfer].bytes_moved += nbytes
        self._sent[part.link] += nbytes

    def _on_ready(self, course: Course, mask: int) -> None:
        if isinstance(course.transfer, Offering):
            self.table.producer.layers_ready(course.transfer, mask)
        course.changed()
        self.wake()

    def _on_never_ready(self, course: Course, error: DeviceError) -> None:
        self.abort(course.transfer, error, "failed")

    def _on_accepted_lost(self, session: Session, link: Link, text: str) -> None:
        if not self._closed:
            self.peers.link_lost(session, text, certain=True)
            self.mover.retire(link)

    def _on_submitted(self, part: Part, layers: Sequence[int], event: Event) -> None:
        course = self._courses.get(part.transfer)
        if isinstance(course, FetchCourse):
            course.submitted(part, layers, event)

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
        actions = self.table.actions
        try:
            if actions:
                self._act()
            if self.mover.submit():
                self.wake()
            if actions:
                self._act()
            self.table.producer.flush()
            self.peers.flush()
            if actions:
                self._act()
        finally:  # whatever happens: deadlines hold
            times = (self.table.next_timer(), self.peers.next_timer())
            self._alarm.set(min((each for each in times if each is not None), default=None))

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
                self._courses[part.transfer].changed()  # who waits for a layer waits in vain
            case ActionKind.CUT:
                self.mover.cut(part)
            case ActionKind.QUARANTINE:
                self._courses[part.transfer].unsure = True
            case ActionKind.ENDED:
                self._ended[part.state.value] += 1
                if part.state is State.LANDED and part.role == "producer" and part.one_sided and part.link:
                    self._on_read(part)
                self.mover.forget(part)
                self._courses[part.transfer].changed()
                self.table.ended(part, self.clock())
            case ActionKind.RESOLVED:
                self._resolve(part.transfer)

    def _connect(self, part: Part) -> None:
        session = part.session
        if session is None or part.ended or session.phase is Phase.CONTACT:
            return
        if session.phase is Phase.ENDED:  # between being looked up and being used
            self.table.fail(part, PeerLostError(f"{part}: {session.error}"))
            return
        if part.role == "producer":
            self.table.producer.connected(part, self.clock())
            return
        peer = self.peers.peer_of(session)
        if peer is None or peer.link is None or peer.transport is None:
            self.peers.open_link(session)
            return
        name, one_sided = peer.transport.name, peer.transport.one_sided
        # Whoever sends may do so as soon as it is asked, and its bytes wait for no stream.
        if one_sided or self._reached(part):
            self.table.consumer.connected(part, self.clock(), name, peer.link.id, one_sided=one_sided)

    def _reached(self, part: Part) -> bool:
        """Whether the caller's stream is done with a fetch's blocks; if not, the part is connected later."""
        course = self._courses.get(part.transfer)
        if not isinstance(course, FetchCourse) or course.after is None:
            return True
        after = course.after
        try:
            if after.done():
                return True
        except DeviceError as error:
            self.table.fail(part, error)
            return False

        def reached(error: DeviceError | None) -> None:
            if error is not None:
                self.table.fail(part, error)
            else:
                self._connect(part)
            self.wake()

        self.poller.watch(after, course.stream, reached)
        return False

    def _start(self, part: Part) -> None:
        if not part.active:
            return
        course = self._courses[part.transfer]
        try:
            link = self._link_of(part)
            if part.role == "producer" and part.one_sided:
                course.bytes_total += self._readable(part)
            else:
                course.bytes_total += self.mover.start(part, link, course.after)
        except (AiokvError, ValueError) as error:
            self.table.fail(part, error if isinstance(error, AiokvError) else InvalidBlocks(str(error)))
            return
        if part.role == "producer":
            self.table.producer.accept(part, self.clock())

    def _readable(self, part: Part) -> int:
        """Bytes that a reader takes of an offer by itself."""
        return planned_bytes(
            self.layout,
            part.transfer.blocks,
            first_token=part.first_token,
            tokens=part.tokens,
            heads=part.heads,
        )

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
        return self._accepted.claim(part, session)

    def _resolve(self, transfer: Transfer) -> None:
        """All parts ended: the blocks are the caller's again, and whoever waits may know."""
        course = self._courses.pop(transfer)
        lease, course.lease, course.after = course.lease, None, None
        if lease is not None and course.unsure:
            self._quarantined.append(lease)
        elif lease is not None:
            lease.give_back()
        course.end()

    # -- time

    def _on_time(self, now: int) -> None:
        self.table.handle_timer(now)
        self.peers.handle_timer(now)
        self.wake()

    # -- for people

    def statistics(self) -> Statistics:
        """A snapshot; it may be taken from any thread."""
        return Statistics(
            bytes_received=sum(dict(self._received).values()),
            bytes_sent=sum(dict(self._sent).values()),
            received_by_transport=dict(self._received),
            sent_by_transport=dict(self._sent),
            parts_ended=dict(self._ended),
            offers=self.table.count("producer"),
            fetches=self.table.count("consumer"),
            parts=len(self.table.ledger.parts),
            parked=len(self.table.waiting),
            leases=self.leases.out,
            blocks_held=self.leases.held(),
            quarantined=len(self._quarantined),
            blocks_quarantined=self.quarantined,
            state_times=self._stopwatch.snapshot(),
            parts_queued=self.mover.parts_queued,
            in_flight=self.mover.in_flight,
            bytes_in_flight=self.mover.bytes_in_flight,
            window_bytes=self.settings.window_bytes,
            sessions=len(self.peers.sessions),
            sessions_lost=self.peers.sessions_lost,
            frames_sent=self.peers.frames_sent,
            frames_received=self.demultiplexer.frames_received,
            frames_stray=self.demultiplexer.frames_stray,
            turns=self._turns,
            loop_lag_max=self._alarm.lag / 1e9,
            loop_lags=self._alarm.lags.snapshot(),
            completion=self.poller.statistics,
        )
