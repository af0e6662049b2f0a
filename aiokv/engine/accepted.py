"""The links that consumers opened to this engine, and whose parts each of them serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiokv.errors import PeerLostError
from aiokv.proto.session import Session
from aiokv.proto.transfers import Part
from aiokv.transports.base import Link, Transport

__all__ = ["AcceptedLinks"]


class AcceptedLinks:
    """Links at their producer's end; each belongs to the session whose grant named it first.

    Args:
        transports: The transports that can be used, started.
        lost: Called once for each link when it is lost: what was read through it is read no more.
    """

    def __init__(self, transports: Sequence[Transport], lost: Callable[[Session, Link, str], None]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._lost = lost
        self._links: dict[bytes, tuple[Session, Link]] = {}

    def claim(self, part: Part, session: Session) -> Link:
        """The link that a granted part of this session named.

        Raises:
            PeerLostError: There is none of that name, or none that this part may use.
        """
        transport = self._transports.get(part.link)
        link = transport.accepted(part.link_id) if transport is not None else None
        if transport is None or link is None or link.lost:
            raise PeerLostError(f"{part}: there is no such {part.link} link")
        if transport.one_sided is not part.one_sided:
            raise PeerLostError(f"{part}: the grant's block list doesn't fit {part.link}")
        if part.link_id not in self._links:
            self._links[part.link_id] = session, link
            name, link_id = part.link, part.link_id
            link.on_lost(lambda: self._on_lost(name, link_id))
        elif self._links[part.link_id][0] is not session:
            raise PeerLostError(f"{part}: the {part.link} link belongs to another session")
        return link

    def close(self, session: Session) -> None:
        """Close the links of a session that is over: what it was to be sent is read no more."""
        for owner, link in list(self._links.values()):
            if owner is session:
                link.close()

    def _on_lost(self, name: str, link_id: bytes) -> None:
        session, link = self._links.pop(link_id)
        self._lost(session, link, f"the {name} link from {session.address} is lost")
