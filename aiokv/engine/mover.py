"""Moves the bytes of parts: from the table's decisions to submitted copies, and back.

For each part that both sides agreed on there is one movement: its plan, what of it is still
missing, and what is in flight. Chunks are taken from the scheduler and submitted to links, one
at a time and never for longer than the device's budget in one turn of the loop; completions are
reported to the table. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from aiokv.device.base import Event
from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.engine.movement import Flow, Movement
from aiokv.errors import AiokvError, DeviceError, PeerLostError
from aiokv.proto.plan import Chunk, Side, plan_copy
from aiokv.proto.schedule import ChunkScheduler
from aiokv.proto.session import Session
from aiokv.proto.settings import Settings
from aiokv.proto.table import Table
from aiokv.proto.transfers import Part
from aiokv.transports.base import Link

__all__ = ["Mover"]

#: Streams that copies are spread over; parts on different streams don't wait for each other.
_STREAMS = 4
#: Where the producer sends, a chunk is so many times larger: its link gives it to the socket in slices
#: of its own, so that it doesn't hold the loop, and what a chunk costs at both ends is the same for any size.
_SENT_AS_ONE = 4
#: Stands for what is in flight of a part that failed or was stopped.
_NOTHING = Chunk(0, 0, 0, 0, 0, 0)


class Mover:
    """The data plane of one engine.

    Args:
        table: The transfer table; told what landed, failed and became quiet.
        cache: This engine's registered memory.
        poller: Turns device events into calls.
        clock: The time (ns).
        settings: Sizes.
        wake: Asks for another turn.
        moved: Told of each chunk that completed: its part, its layers, the bytes of each, and a mask of those
            that are through.
        submitted: Told when all of some layers of a fetch's part was submitted, with the event that covers
            it.
    """

    def __init__(
        self,
        table: Table,
        cache: KVCache,
        poller: CompletionPoller,
        *,
        clock: Callable[[], int],
        settings: Settings,
        wake: Callable[[], None],
        moved: Callable[[Part, Sequence[int], int, int], None],
        submitted: Callable[[Part, Sequence[int], Event], None],
    ) -> None:
        self._table = table
        self._cache = cache
        self._poller = poller
        self._clock = clock
        self._settings = settings
        self._wake = wake
        self._moved = moved
        self._submitted = submitted
        self._scheduler: ChunkScheduler[Flow, Part] = ChunkScheduler(settings.window_bytes)
        self._movements: dict[Part, Movement] = {}
        self._flows: dict[int, Flow] = {}  # by the identity of the link
        #: Movements with chunks that wait for a lease to be confirmed.
        self._leasing: dict[Session, dict[Movement, None]] = {}
        self._streams = [cache.device.stream() for _ in range(_STREAMS)]
        self._turn = 0
        #: Submitted chunks that have not completed, over all parts.
        self.in_flight = 0

    @property
    def movements(self) -> int:
        """Parts that have a plan and have not ended."""
        return len(self._movements)

    @property
    def parts_queued(self) -> int:
        """Parts with chunks that wait to be submitted."""
        return len(self._scheduler)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of submitted copies that count in the window."""
        return self._scheduler.in_flight

    # -- what the table asks for

    def start(self, part: Part, link: Link, after: Event | None = None) -> int:
        """Both block lists of a part are known: make its plan.

        Args:
            part: The part.
            link: The path its bytes take.
            after: At a consumer: point on the caller's stream that the writes have to wait for.

        Returns:
            Bytes that the part moves.

        Raises:
            AiokvError, ValueError: The two block lists don't fit together.
        """
        transfer, session = part.transfer, part.session
        if session is None or session.hello is None:
            raise PeerLostError(f"{part}: the session is gone")
        mine = Side(layout=self._cache.layout, placement=self._cache.placement, blocks=transfer.blocks)
        theirs = Side(layout=session.hello.layout, placement=session.hello.placement, blocks=part.peer_blocks)
        src, dst = (mine, theirs) if part.role == "producer" else (theirs, mine)
        plan = plan_copy(src, dst, first_token=part.first_token, tokens=part.tokens, heads=part.heads)
        if after is not None and not after.done():
            # A stream of its own: copies of others must not queue behind what this one waits for.
            stream = self._cache.device.stream()
            stream.wait(after)
        else:
            self._turn += 1
            stream, after = self._streams[self._turn % _STREAMS], None
        flow = self._flow(link)
        if part.role == "producer" and not part.one_sided and not flow.listening:
            flow.listening = True
            link.on_writable(lambda: self._writable(flow))
        flow.parts += 1
        sizes = [plan.nbytes(layer) for layer in plan.layers]
        movement = Movement(part, flow, plan, stream, after, sizes, sizes.copy())
        self._movements[part] = movement
        if part.role == "consumer":
            if not part.one_sided:
                link.expect(movement.id, plan, self._cache.buffers, self._receiver(movement))
            empty = sum(1 << layer for layer, left in enumerate(movement.missing) if not left)
            if empty:
                self._table.consumer.copied(part, empty)
        return plan.total

    def move(self, part: Part, mask: int) -> None:
        """Layers may be copied from (consumer), or sent (producer)."""
        movement = self._movements.get(part)
        if movement is None or movement.stopped:
            return
        layers = [layer for layer in _layers(mask) if movement.missing[layer]]
        if not layers:
            return
        limit = self._settings.chunk_bytes * movement.link.pace * (1 if part.one_sided else _SENT_AS_ONE)
        chunks = movement.plan.chunks(layers, limit)
        self._scheduler.add(movement.flow, part, chunks, movement.priority)
        self._wake()

    def stop(self, part: Part, link: Link | None) -> None:
        """Submit nothing more of a part; the table hears when nothing is in flight.

        Args:
            part: The part.
            link: The link to its producer, at a consumer, as long as there is one.
        """
        movement = self._movements.get(part)
        if movement is None:
            if part.role == "consumer" and not part.one_sided and link is not None:
                link.forget(part.transfer.key)  # the producer may have begun to send
            self._table.ledger.quiet(part)
            return
        movement.stopped = True
        movement.held_back.clear()
        movement.unconfirmed.clear()
        self._scheduler.drop(part)
        if part.role == "consumer" and not part.one_sided:
            writing = movement.link.forget(movement.id)
            if writing is not None:
                self._watch(movement, _NOTHING, 0, writing, writing)
                return
        if not movement.in_flight:
            self._table.ledger.quiet(part)

    def cut(self, part: Part) -> None:
        """At a producer that sends: the consumer takes nothing. What the link was given is taken back."""
        movement = self._movements.get(part)
        if movement is not None:
            movement.link.close()

    def forget(self, part: Part) -> None:
        """The part ended."""
        movement = self._movements.pop(part, None)
        if movement is not None:
            self._scheduler.drop(part)
            if part.session in self._leasing:
                self._leasing[part.session].pop(movement, None)
                if not self._leasing[part.session]:
                    del self._leasing[part.session]
            movement.flow.parts -= 1
            self._drop_flow(movement.flow)

    def retire(self, link: Link) -> None:
        """The link's session is over: close it, once nothing in flight uses it."""
        flow = self._flow(link)
        flow.retired = True
        self._drop_flow(flow)

    def _flow(self, link: Link) -> Flow:
        flow = self._flows.get(id(link))
        if flow is None:
            flow = self._flows[id(link)] = Flow(link)
        return flow

    def _drop_flow(self, flow: Flow) -> None:
        if flow.retired and not flow.in_flight and not flow.parts:
            flow.link.close()
            self._scheduler.unblock(flow)
            self._flows.pop(id(flow.link), None)

    def lease_extended(self, session: Session) -> None:
        """A producer confirmed its lease: what was held back for it may go on."""
        # When it said so, it still held the blocks, or its ABORT would have come before.
        vouched = session.lease_held - self._settings.lease_ns
        for movement in self._leasing.pop(session, {}):
            for chunk in movement.held_back:
                self._scheduler.put_back(movement.flow, movement.part, chunk, movement.priority)
            movement.held_back.clear()
            late, movement.unconfirmed = movement.unconfirmed, []
            for when, chunk in late:
                if when <= vouched:
                    self._landed(movement, chunk)
                else:
                    self._doubt(movement, when, chunk, session)
        self._wake()

    # -- one turn

    def submit(self) -> bool:
        """Submit chunks for as long as the device's budget allows.

        Returns:
            Whether chunks are left that could go now: another turn is wanted.
        """
        if not self._scheduler:
            return False
        until = self._clock() + int(self._cache.device.budget_s * 1e9)
        while (taken := self._scheduler.take()) is not None:
            part, chunk = taken
            self._submit(self._movements[part], chunk)
            if self._clock() >= until:
                return bool(self._scheduler)
        return False

    def _submit(self, movement: Movement, chunk: Chunk) -> None:
        part = movement.part
        session = part.session
        if part.role == "consumer" and session is not None and self._clock() >= session.lease_held:
            # Read now, the bytes may be another request's already.
            self._scheduler.finished(chunk.nbytes)
            if not movement.held_back:
                session.ask()
            movement.held_back.append(chunk)
            self._leasing.setdefault(session, {})[movement] = None
            return
        if part.role == "producer" and not movement.link.writable:
            self._scheduler.finished(chunk.nbytes)
            self._scheduler.put_back(movement.flow, part, chunk, movement.priority)
            self._scheduler.block(movement.flow)
            return
        try:
            held_up = movement.held_up()
            event = movement.submit(chunk, self._cache.buffers)
        except AiokvError as error:
            self._scheduler.finished(chunk.nbytes)
            self._scheduler.drop(part)
            self._table.fail(part, error)
            if isinstance(error, DeviceError):
                self._watch_rest(movement)
            return
        # What waits for its caller's stream takes nothing of the window, where others could go.
        counted = 0 if held_up else chunk.nbytes // movement.link.pace
        self._scheduler.finished(chunk.nbytes - counted)
        if part.role == "consumer":
            through = movement.count(movement.unsubmitted, chunk)
            if through:
                # The stream is in order: this covers the layers. A link's own event may stand for more than
                # the device's (is the producer still there?), and then it is none that a stream can wait
                # for. Where the device fails, whoever watches that hears of it; nobody counts on the order.
                with suppress(DeviceError):
                    self._submitted(part, tuple(_layers(through)), movement.stream.record())
        # A link takes what it sends in order, whatever stream that was ready on; and one that
        # takes nothing must hold up no other's completions.
        self._watch(
            movement, chunk, counted, event, movement.flow if part.role == "producer" else movement.stream
        )

    def _watch_rest(self, movement: Movement) -> None:
        """A chunk could not be submitted, but some of it may have been: that is in flight, too."""
        with suppress(DeviceError):  # where not even this can be submitted, nothing runs any more
            event = movement.stream.record()
            if not event.done():
                self._watch(movement, _NOTHING, 0, event, movement.stream)

    def _watch(self, movement: Movement, chunk: Chunk, counted: int, event: Event, order: object) -> None:
        """Something is in flight until ``event`` is done; events of one ``order`` come in that order."""
        movement.in_flight += 1
        movement.flow.in_flight += 1
        self.in_flight += 1
        rate = movement.link.rate
        if not rate:  # most likely it is over, and then nobody needs to be asked again
            try:
                finished = event.done()
            except DeviceError as error:
                self._completed(movement, chunk, counted, error)
                return
            if finished:
                self._completed(movement, chunk, counted, None)
                return
        self._poller.watch(
            event,
            order,
            lambda error: self._completed(movement, chunk, counted, error),
            expected_ns=chunk.nbytes // rate if rate else 0,
        )

    def _completed(self, movement: Movement, chunk: Chunk, counted: int, error: AiokvError | None) -> None:
        part = movement.part
        movement.in_flight -= 1
        movement.flow.in_flight -= 1
        self.in_flight -= 1
        self._scheduler.finished(counted)
        self._wake()
        self._drop_flow(movement.flow)
        if error is not None and isinstance(error.__cause__, PeerLostError):
            # The device is well, the link is gone: this may come before its session hears of that.
            error = PeerLostError(f"{part}: {error.__cause__}")
        if isinstance(error, DeviceError) and movement.stream in self._streams:
            # What comes after a failure on a stream fails, too; so no other part gets this one. On a device
            # that is lost there is no better one, and the part has to end all the same.
            with suppress(DeviceError):
                self._streams[self._streams.index(movement.stream)] = self._cache.device.stream()
        if movement.stopped:
            if not movement.in_flight:
                self._table.ledger.quiet(part)
            return
        if chunk is _NOTHING:  # its part failed, and is about to be stopped
            return
        if error is not None:
            self._table.fail(part, error)
            return
        session, now = part.session, self._clock()
        if part.role == "consumer" and session is not None and now > session.lease_held:
            self._doubt(movement, now, chunk, session)
            return
        self._landed(movement, chunk)

    def _doubt(self, movement: Movement, when: int, chunk: Chunk, session: Session) -> None:
        """A chunk was read after the time that the producer vouched for.

        It counts once the producer says that it still holds the blocks. It is not read again: the
        caller may have enqueued work on it by then, as ``layer_ordered`` allows.
        """
        if not movement.unconfirmed:
            session.ask()
        movement.unconfirmed.append((when, chunk))
        self._leasing.setdefault(session, {})[movement] = None

    def _landed(self, movement: Movement, chunk: Chunk) -> None:
        part = movement.part
        through = movement.count(movement.missing, chunk)
        self._moved(part, movement.plan.layers_of(chunk), chunk.nbytes // chunk.layers, through)
        if through and part.role == "consumer":
            self._table.consumer.copied(part, through)

    # -- two-sided links

    def _receiver(self, movement: Movement) -> Callable[[Chunk], None]:
        def landed(chunk: Chunk) -> None:
            if not movement.stopped and movement.part.active:
                self._table.consumer.moving(movement.part)
                self._landed(movement, chunk)
                self._wake()

        return landed

    def _writable(self, flow: Flow) -> None:
        self._scheduler.unblock(flow)
        self._wake()


def _layers(mask: int) -> Iterator[int]:
    """The bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
