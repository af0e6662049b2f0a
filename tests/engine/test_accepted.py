"""Links that consumers opened: each serves the parts of one session, until it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.engine.accepted import AcceptedLinks
from aiokv.errors import PeerLostError
from aiokv.proto.transfers import Offering, Part


class Link:
    lost = False

    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        self.closed = False

    def on_lost(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        self.lost = True
        for callback in self.callbacks:
            callback()


class Transport:
    name = "wire"
    one_sided = True

    def __init__(self) -> None:
        self.links = {b"1": Link(), b"2": Link()}

    def accepted(self, link: bytes) -> Link | None:
        return self.links.get(link)


class Session:
    def __init__(self, address: str) -> None:
        self.address = address


def part(link: str = "wire", link_id: bytes = b"1", *, one_sided: bool = True) -> Part:
    offering = Offering(tid="t", attempt=0, deadline=0, blocks=(), tokens=0)
    return Part(transfer=offering, role="producer", link=link, link_id=link_id, one_sided=one_sided)


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def lost() -> list[tuple[Any, Any, str]]:
    return []


@pytest.fixture
def accepted(transport: Any, lost: list[tuple[Any, Any, str]]) -> AcceptedLinks:
    return AcceptedLinks([transport], lambda *what: lost.append(what))


def test_the_parts_of_one_session_share_a_link(accepted: Any, transport: Transport) -> None:
    session = Session("a")
    assert accepted.claim(part(), session) is transport.links[b"1"]
    assert accepted.claim(part(), session) is transport.links[b"1"]
    assert len(transport.links[b"1"].callbacks) == 1


def test_another_session_may_not_use_it(accepted: Any) -> None:
    accepted.claim(part(), Session("a"))
    with pytest.raises(PeerLostError, match="belongs to another session"):
        accepted.claim(part(), Session("b"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (part("string"), "no such string link"),
        (part(link_id=b"3"), "no such wire link"),
        (part(one_sided=False), "block list doesn't fit wire"),
    ],
)
def test_what_does_not_fit_is_refused(accepted: Any, wrong: Part, message: str) -> None:
    with pytest.raises(PeerLostError, match=message):
        accepted.claim(wrong, Session("a"))


def test_a_lost_link_is_told_once_and_cannot_be_claimed(
    accepted: Any, transport: Transport, lost: list[tuple[Any, Any, str]]
) -> None:
    session, link = Session("a"), transport.links[b"1"]
    accepted.claim(part(), session)
    link.lose()
    assert lost == [(session, link, "the wire link from a is lost")]
    with pytest.raises(PeerLostError, match="no such"):
        accepted.claim(part(), session)


def test_the_end_of_a_session_closes_its_links_alone(accepted: Any, transport: Transport) -> None:
    session = Session("a")
    accepted.claim(part(), session)
    accepted.claim(part(link_id=b"2"), Session("b"))
    accepted.close(session)
    assert transport.links[b"1"].closed
    assert not transport.links[b"2"].closed
