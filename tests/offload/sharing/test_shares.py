"""What the owner of a pool decides, against a model of what each guest knows and touches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.errors import RemoteProtocolError
from aiokv.offload.policies import Lru
from aiokv.offload.sharing.messages import (
    Clear,
    Count,
    Delete,
    Done,
    Find,
    Found,
    FromOwner,
    Keep,
    Kept,
    Mapped,
    Release,
    Removed,
    Reset,
    Spoilt,
    Written,
)
from aiokv.offload.sharing.offers import Guest
from aiokv.offload.sharing.shares import Shares

NAMES = [b"a", b"b", b"c", b"d"]

PREFIXES = st.one_of(
    st.integers(1, len(NAMES)).map(lambda count: NAMES[:count]),
    st.lists(st.sampled_from(NAMES), unique=True, min_size=1),
)

#: 0 one time in eight: what undoes much is to be done rarely.
RARE = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 0])


def attached(shares: Shares, digest: bytes = b"1" * 16) -> tuple[Guest, list[FromOwner]]:
    heard: list[FromOwner] = []
    guest = shares.attach(digest, heard.append)
    shares.receive(guest, Mapped(shares.table.capacity))
    return guest, heard


class Known:
    """What a guest knows, and may touch."""

    def __init__(self, guest: Guest, digest: bytes) -> None:
        self.guest = guest
        self.digest = digest
        self.held: Counter[int] = Counter()
        #: Places that it writes, and what.
        self.writing: dict[int, bytes] = {}
        #: What it asked and was not answered.
        self.asked: dict[int, Find | Keep] = {}
        self.lost = False


class Machine(RuleBasedStateMachine):
    """Some guests, that do anything they may, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(Lru())
        self.shares.table.grow(6)
        self.guests: list[Known] = []
        #: What was last written to each place, and is to be found there; None once it was dropped.
        self.content: dict[int, tuple[bytes, bytes] | None] = {}
        self.number = 0

    def hear(self, known: Known, message: FromOwner) -> None:
        assert not known.lost
        match message:
            case Found():
                asked = known.asked.pop(message.id)
                assert isinstance(asked, Find)
                for place, name in zip(message.places, asked.keys, strict=False):
                    if known.writing.get(place) != name:
                        assert self.content.get(place) == (known.digest, name)
                        assert all(place not in other.writing for other in self.guests)
                    known.held[place] += 1
            case Kept():
                asked = known.asked.pop(message.id)
                assert isinstance(asked, Keep)
                for index, place in message.new:
                    assert all(not other.held[place] for other in self.guests), "it is somebody's"
                    known.held[place] = 1
                    known.writing[place] = asked.keys[index]
                    self.content[place] = None
                for index, place in message.pending:
                    assert known.writing[place] == asked.keys[index]
                assert message.kept + message.refused == len(asked.keys)
            case Removed():
                for name in message.keys:
                    for place, there in self.content.items():
                        if there == (known.digest, name):
                            self.content[place] = None
            case Reset() | Done():
                pass
            case _:
                pytest.fail(f"it hears {message}")

    def ask(self, known: Known, message: Find | Keep) -> None:
        known.asked[message.id] = message
        self.shares.receive(known.guest, message)

    def next(self) -> int:
        self.number += 1
        return self.number

    def one(self, data: st.DataObject) -> Known:
        return data.draw(st.sampled_from([known for known in self.guests if not known.lost]))

    @initialize()
    def begin(self) -> None:
        for digest in (b"1" * 16, b"1" * 16, b"2" * 16):
            self.attach(digest)

    @precondition(lambda self: len(self.guests) < 4)
    @rule(digest=st.sampled_from([b"1" * 16, b"2" * 16]))
    def attach(self, digest: bytes) -> None:
        known: list[Known] = []
        guest = self.shares.attach(digest, lambda message: self.hear(known[0], message))
        known.append(Known(guest, digest))
        self.guests.append(known[0])
        self.shares.receive(guest, Mapped(6))

    @precondition(lambda self: any(not known.lost for known in self.guests))
    @rule(data=st.data(), names=PREFIXES)
    def find(self, data: st.DataObject, names: list[bytes]) -> None:
        self.ask(self.one(data), Find(self.next(), names))

    @rule(names=PREFIXES)
    def all_look(self, names: list[bytes]) -> None:
        for known in self.guests:
            if not known.lost:
                before = known.held.copy()
                self.ask(known, Find(self.next(), names))
                found = known.held - before
                known.held = before
                self.shares.receive(known.guest, Release(list(found)))

    @precondition(lambda self: any(not known.lost for known in self.guests))
    @rule(data=st.data(), names=PREFIXES)
    def keep(self, data: st.DataObject, names: list[bytes]) -> None:
        self.ask(self.one(data), Keep(self.next(), names, None))

    @rule(times=st.integers(1, 2))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.shares.give_up_old()

    @precondition(lambda self: any(known.writing and not known.lost for known in self.guests))
    @rule(data=st.data(), ok=st.booleans())
    def written(self, data: st.DataObject, ok: bool) -> None:
        known = data.draw(st.sampled_from([each for each in self.guests if each.writing and not each.lost]))
        places = data.draw(st.lists(st.sampled_from(sorted(known.writing)), unique=True, min_size=1))
        for place in places:
            name = known.writing.pop(place)
            there = self.shares.table.key_at(place) == known.digest + name
            self.content[place] = (known.digest, name) if ok and there else None
        self.shares.receive(known.guest, Written(self.next(), places, ok))

    @precondition(lambda self: any(known.held and not known.lost for known in self.guests))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([each for each in self.guests if each.held and not each.lost]))
        place = data.draw(st.sampled_from(sorted(known.held)))
        if place in known.writing and known.held[place] == 1:
            with pytest.raises(RemoteProtocolError):
                self.shares.receive(known.guest, Release([place]))
            return
        known.held[place] -= 1
        known.held = +known.held
        self.shares.receive(known.guest, Release([place]))

    @precondition(lambda self: any(known.held and not known.lost for known in self.guests))
    @rule(data=st.data(), chance=RARE)
    def spoilt(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        known = data.draw(st.sampled_from([each for each in self.guests if each.held and not each.lost]))
        place = data.draw(st.sampled_from(sorted(known.held)))
        self.content[place] = None
        self.shares.receive(known.guest, Spoilt(self.next(), [place]))

    @precondition(lambda self: any(not known.lost for known in self.guests))
    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), unique=True), chance=RARE)
    def delete(self, data: st.DataObject, names: list[bytes], chance: int) -> None:
        if chance:
            return
        known = self.one(data)
        for place, there in self.content.items():
            if there is not None and there[0] == known.digest and there[1] in names:
                self.content[place] = None
        self.shares.receive(known.guest, Delete(self.next(), names))
        self.shares.receive(known.guest, Count(self.next(), names))

    @precondition(lambda self: any(not known.lost for known in self.guests))
    @rule(data=st.data(), chance=RARE)
    def clear(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        self.content = dict.fromkeys(self.content)
        self.shares.receive(self.one(data).guest, Clear(self.next()))
        assert not self.shares.waiting

    @precondition(lambda self: any(not known.lost for known in self.guests))
    @rule(data=st.data(), chance=RARE)
    def lose(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        known = self.one(data)
        known.lost = True
        self.shares.lost(known.guest)

    @precondition(lambda self: self.guests)
    @rule(data=st.data(), chance=RARE)
    def end(self, data: st.DataObject, chance: int) -> None:
        if chance:
            return
        known = data.draw(st.sampled_from(self.guests))
        self.guests.remove(known)
        known.lost = True
        self.shares.gone(known.guest)

    @invariant()
    def what_is_held_is_in_use(self) -> None:
        table = self.shares.table
        users = Counter(place for known in self.guests for place in known.held)
        assert [users[place] for place in range(6)] == list(table._pins.counts)
        assert (table.in_use, table.pending) == (len(users), sum(len(known.writing) for known in self.guests))
        assert len(table) + table.free + table.detached == 6

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for known in self.guests:
            for waiting in known.guest.waiting:
                assert waiting.places
                for place in waiting.places:
                    assert any(place in other.writing for other in self.guests if other is not known)

    def teardown(self) -> None:
        for known in list(self.guests):
            self.guests.remove(known)
            known.lost = True
            self.shares.gone(known.guest)
        table = self.shares.table
        assert (table.in_use, table.pending, table.detached) == (0, 0, 0)
        assert len(table) + table.free == 6
        assert not self.shares.waiting


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestShares = Machine.TestCase


def test_many_offers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiokv.offload.sharing import offers

    monkeypatch.setattr(offers, "_MOST", 3)
    shares = Shares(Lru())
    shares.table.grow(4)
    one, ones = attached(shares)
    other, others = attached(shares)
    shares.receive(one, Keep(1, [b"a"], None))
    for number in range(5):
        shares.receive(other, Keep(number, [b"a"], None))
    assert [answer.kept for answer in others if isinstance(answer, Kept)] == [0, 0]
    answer = ones[-1]
    assert isinstance(answer, Kept)
    shares.receive(one, Written(2, [place for _, place in answer.new], True))
    assert [answer.kept for answer in others if isinstance(answer, Kept)] == [0, 0, 1, 1, 1]


def test_an_offer_does_not_wait_for_ever() -> None:
    shares = Shares(Lru())
    shares.table.grow(4)
    one, _ = attached(shares)
    other, others = attached(shares)
    shares.receive(one, Keep(1, [b"b"], None))
    shares.receive(other, Keep(1, [b"a", b"b", b"c"], None))
    shares.give_up_old()
    assert others == []
    assert shares.waiting
    shares.give_up_old()
    answer = others[-1]
    assert isinstance(answer, Kept)
    assert (answer.kept, answer.refused, len(answer.new)) == (1, 2, 1)
    assert not shares.waiting
    shares.receive(other, Count(2, [b"a", b"b"]))
    assert others[-1] == Done(2, 1, 2), "what another is writing isn't there"


def test_an_offer_of_what_several_write_waits_for_all() -> None:
    shares = Shares(Lru())
    shares.table.grow(4)
    guests = [attached(shares) for _ in range(3)]
    places = {}
    for index in (0, 1):
        guest, heard = guests[index]
        shares.receive(guest, Keep(1, [NAMES[index]], None))
        assert isinstance(heard[-1], Kept)
        places[index] = [place for _, place in heard[-1].new]
    last, heard = guests[2]
    shares.receive(last, Keep(1, NAMES[:3], None))
    assert heard == []
    shares.receive(guests[0][0], Written(2, places[0], True))
    assert heard == []
    shares.gone(guests[1][0])
    assert isinstance(heard[-1], Kept)
    assert (heard[-1].kept, [index for index, _ in heard[-1].new]) == (3, [1, 2])


def test_only_what_others_could_find_is_told_to_go() -> None:
    shares = Shares(Lru())
    shares.table.grow(2)
    one, ones = attached(shares)
    _, others = attached(shares)
    _, strangers = attached(shares, b"2" * 16)
    shares.receive(one, Keep(1, [b"a"], None))
    assert isinstance(ones[-1], Kept)
    place = ones[-1].new[0][1]
    shares.receive(one, Written(2, [place], False))
    shares.receive(one, Release([place]))
    assert others == []
    shares.receive(one, Keep(3, [b"a", b"b"], None))
    assert isinstance(ones[-1], Kept)
    places = [place for _, place in ones[-1].new]
    shares.receive(one, Written(4, places, True))
    assert ones[-1] == Done(4, 2, 0)
    shares.receive(one, Release(places))
    shares.receive(one, Keep(5, [b"c"], None))
    assert others == [Removed([b"b"], [], "evicted")]
    assert strangers == []
