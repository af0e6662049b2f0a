"""Tables and sessions under anything in any order: each part ends once, and nobody reads on."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.errors import AiokvError, DeviceError, TransferAborted
from aiokv.proto.parts import State
from aiokv.proto.session import Identity
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.transfers import ActionKind, Fetching, Offering
from aiokv.testing.tables import Member, Net

SETTINGS = Settings()


class AnyTransfers(RuleBasedStateMachine):
    """Two producers of half the heads, two consumers, and whatever may happen to a few transfers.

    Frames are carried in any portions, lost, said twice and held; sessions are ended by one side; members are
    killed, and others live in their places; time passes; copies and what a producer sends stay in flight.

    Whenever a producer's part that is read comes to its end, its consumer must not read on what it
    would count as good; what a consumer holds as landed decides; and in the end everything has ended.
    """

    @initialize(one_sided=st.booleans())
    def begin(self, one_sided: bool) -> None:
        self.net = Net()
        self.sources = [self.net.add("low", heads=(0, 2)), self.net.add("high", heads=(2, 4))]
        self.readers = [self.net.add("b"), self.net.add("c")]
        for reader in self.readers:
            reader.one_sided = one_sided
        self.offers: list[tuple[Member, Offering]] = []
        self.fetches: list[tuple[Member, Fetching]] = []
        self.checked: set[object] = set()
        self.lives = 0
        #: Frames were lost, so that gaps may be met; something was in flight where it is sent.
        self.gaps = self.sent = False

    transfers = st.integers(0, 2).map(lambda number: f"t{number}")

    @rule(tid=transfers, which=st.integers(0, 1), to=st.sampled_from([(), (0,), (1,), (0, 1)]))
    def offer(self, tid: str, which: int, to: tuple[int, ...]) -> None:
        member = self.sources[which]
        if all(each is not member or offer.tid != tid for each, offer in self.offers):
            named = [self.readers[number] for number in to]
            self.offers.append((member, member.offer(tid, to=named, readers=2, deadline=5)))

    @rule(tid=transfers, which=st.integers(0, 1), push=st.booleans(), hit=st.booleans())
    def fetch(self, tid: str, which: int, push: bool, hit: bool) -> None:
        member = self.readers[which]
        if all(each is not member or fetch.tid != tid for each, fetch in self.fetches):
            sources = [] if push else self.sources
            tokens = (8, 8) if hit else (0, -1)
            first, last = tokens
            made = member.fetch(tid, sources=sources, parts=2, first_token=first, tokens=last, deadline=4)
            self.fetches.append((member, made))

    @rule(tid=transfers, which=st.integers(0, 1))
    def move(self, tid: str, which: int) -> None:
        """The usual way, so that what may happen in mid-transfer is tried often."""
        for source in range(2):
            self.offer(tid, source, ())
        self.fetch(tid, which, push=False, hit=False)
        self.net.run()
        for number in range(len(self.offers)):
            self.ready(number, 0)
        self.net.run()
        for number in range(len(self.fetches)):
            self.submit(number)

    @rule(pick=st.integers(0, 99), layer=st.integers(0, 3))
    @precondition(lambda self: self.offers)
    def ready(self, pick: int, layer: int) -> None:
        member, offer = self.offers[pick % len(self.offers)]
        member.ready(offer, layer)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.fetches)
    def submit(self, pick: int) -> None:
        """Copies are in flight from now on."""
        member, fetch = self.fetches[pick % len(self.fetches)]
        for part in fetch.parts:
            if part.state is State.MOVING and part not in member.stopped:
                member.busy.add(part)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.fetches)
    def complete(self, pick: int) -> None:
        member, fetch = self.fetches[pick % len(self.fetches)]
        for part in fetch.parts:
            member.rest(part)
            moving = part.state is State.MOVING and part not in member.stopped and part.one_sided
            if moving and self.net.now <= part.session.lease_held:
                member.table.consumer.copied(part, member.moves[part])

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.offers)
    def send(self, pick: int) -> None:
        """What a producer has sent is in flight from now on."""
        member, offer = self.offers[pick % len(self.offers)]
        for part in offer.parts:
            if part.state is State.MOVING and not part.one_sided and part not in member.stopped:
                member.busy.add(part)
                self.sent = True

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.sent)
    def taken(self, pick: int) -> None:
        """The socket took it."""
        member, offer = self.offers[pick % len(self.offers)] if self.offers else (None, None)
        for part in offer.parts if offer else ():
            member.rest(part)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.offers or self.fetches)
    def abort(self, pick: int) -> None:
        both = [*self.offers, *self.fetches]
        member, transfer = both[pick % len(both)]
        if not transfer.resolved:
            member.abort(transfer, TransferAborted("enough"))

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.fetches)
    def break_copy(self, pick: int) -> None:
        member, fetch = self.fetches[pick % len(self.fetches)]
        for part in fetch.parts:
            if part.state is State.MOVING:
                member.table.fail(part, DeviceError("broken"))
                break

    @rule(ns=st.sampled_from([1, SECOND // 10, SECOND // 2, SECOND, 2 * SECOND]))
    def wait(self, ns: int) -> None:
        self.turn()  # an engine sets its timers in its turns
        self.net.now += ns
        for member in self.net.members.values():
            member.tick()

    @rule()
    def turn(self) -> None:
        for member in self.net.members.values():
            member.turn()

    @rule(most=st.integers(1, 3))
    def carry(self, most: int) -> None:
        self.net.carry(most)

    @rule(pick=st.integers(0, 99), which=st.integers(0, 9), twice=st.booleans())
    def spoil_a_way(self, pick: int, which: int, twice: bool) -> None:
        """A frame under way is lost, or said twice."""
        ways = [frames for frames in self.net.wire.values() if frames]
        if ways:
            frames = ways[pick % len(ways)]
            at = which % len(frames)
            if twice:
                frames.insert(at, frames[at])
            else:
                del frames[at]
                self.gaps = True

    @rule(which=st.integers(0, 3), certain=st.booleans())
    def kill(self, which: int, certain: bool) -> None:
        """A member is gone with all that it had; another lives in its place. Its peers may know."""
        everybody = [*self.sources, *self.readers]
        old = everybody[which]
        self.offers = [each for each in self.offers if each[0] is not old]
        self.fetches = [each for each in self.fetches if each[0] is not old]
        self.lives += 1
        new = self.net.add(old.name, old.table.ledger.layout)
        new.me = Identity(f"{old.name}{self.lives}".encode().ljust(16, b"."), old.me.hello)
        new.one_sided, new._streams = old.one_sided, old._streams
        where = self.sources if old in self.sources else self.readers
        where[where.index(old)] = new
        for other in self.net.members.values():
            if certain and old.address in other.sessions:
                other.lose(new, certain=True)

    @rule()
    def run(self) -> None:
        self.net.run()

    @rule(source=st.integers(0, 1), reader=st.integers(0, 1), both=st.booleans())
    def stall(self, source: int, reader: int, both: bool) -> None:
        """Nothing comes through in one direction, or both."""
        a, b = self.sources[source], self.readers[reader]
        self.net.held.add((a.name, b.name))
        if both:
            self.net.held.add((b.name, a.name))

    @rule(source=st.integers(0, 1), reader=st.integers(0, 1), which=st.integers(0, 1))
    def lose(self, source: int, reader: int, which: int) -> None:
        """One side ends the session; the other finds out by the next one, or by silence."""
        ends = self.sources[source], self.readers[reader]
        member, other = ends if which else ends[::-1]
        if other.address in member.sessions:
            member.lose(other, certain=False)

    @rule()
    def heal(self) -> None:
        self.net.release()

    @invariant()
    def nobody_reads_what_is_the_producers_again(self) -> None:
        for producer, offer in getattr(self, "offers", []):
            for part in offer.parts:
                if not part.ended or part in self.checked or not part.one_sided or part.session is None:
                    continue
                self.checked.add(part)
                for reader, fetch in self.fetches:
                    if reader.me.incarnation != part.session.incarnation or fetch.key != offer.key:
                        continue
                    for theirs in fetch.parts:
                        if theirs.session is None or theirs.session.incarnation != producer.me.incarnation:
                            continue
                        # What it reads once it has given up is harmless: nobody will look at it.
                        reads = theirs in reader.busy and theirs.state is State.MOVING
                        assert not reads or self.net.now > theirs.session.lease_held
                        if part.state is State.LANDED:
                            assert theirs.state is State.LANDED

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        for member, transfer in (*self.offers, *self.fetches):
            for part in transfer.parts:
                member.rest(part)
        self.net.run()
        until = self.net.now + 5 * SECOND + SETTINGS.drain_ns + SETTINGS.liveness_ns
        everything = [*self.offers, *self.fetches]
        while not all(transfer.resolved for _, transfer in everything):
            for member, transfer in everything:
                for part in transfer.parts:
                    member.rest(part)
            assert self.net.wait_for_timer()
            assert self.net.now <= until
        for _, transfer in everything:
            errors: set[AiokvError | None] = {part.life.error for part in transfer.parts}
            assert (transfer.error is None) == (errors == {None})
            assert all(part.ended for part in transfer.parts)
        self.net.release()
        self.net.run()
        for member in self.net.members.values():
            assert member.table.ledger.parts == {}
            # Frames for who was killed are lost, too.
            assert member.faults == [] or self.gaps or self.lives
        # A lease ends before the drain bound.
        assert self.sent or all(ActionKind.QUARANTINE not in member.kinds for member in self.sources)


TestAnyTransfers = AnyTransfers.TestCase
