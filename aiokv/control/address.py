"""Addresses of the control plane: ``tcp://host:port#key``, checked before anything is opened.

The key is there where peers have keys. It says who has to be at the host and port, so that whoever is told an
address is told whom to trust there.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Address", "bindable", "bracketed", "canonical", "host_and_port", "reachable", "well_formed"]

_LABEL = r"\w(?:[\w-]{0,61}\w)?"
_SIX = r"\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]"
_PATTERN = re.compile(
    rf"(?P<scheme>[a-z]+)://(?:{_SIX}|(?P<host>\*|{_LABEL}(?:\.{_LABEL})*))"
    r"(?::(?P<port>[0-9]{1,5}))?(?:#(?P<key>[0-9A-Fa-f]{2}(?::?[0-9A-Fa-f]{2}){31}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name, an IPv4 or an IPv6 address) and a port; ``str`` gives the address back."""

    scheme: str  # which channel speaks there
    host: str  # without the brackets that IPv6 has in the address; "*" is written out
    port: int | None  # None: none was given; 0: any that is free
    key: str = ""  # of who has to be there, as 64 hexadecimal digits; empty where peers have no keys

    @classmethod
    def parse(cls, text: str, scheme: str = "tcp") -> Address:
        """Take an address apart.

        Raises:
            ValueError: It isn't of the form ``scheme://host:port`` or that with a key; IPv6 goes in brackets.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not {scheme}://host:port (an IPv6 host goes in brackets)")
        if match["scheme"] != scheme:
            raise ValueError(
                f"{text!r} is not {scheme}://host:port: this engine is bound to {scheme}://, and both ends "
                "must use the same"
            )
        host, port = match["six"] or match["host"], match["port"]
        if port is not None and int(port) > 0xFFFF:
            raise ValueError(f"{text!r}: there is no port {port}")
        everywhere = "0.0.0.0"  # noqa: S104
        address = cls(
            scheme,
            everywhere if host == "*" else host,
            None if port is None else int(port),
            (match["key"] or "").replace(":", "").lower(),  # OpenSSL writes 50:60:8D:...
        )
        if address.ip is None and (match["six"] or re.fullmatch(r"[0-9.]+", host)):
            raise ValueError(f"{text!r}: {host} is no IP address")
        return address

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as a number; None if it is a name, which takes a lookup."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def any_host(self) -> bool:
        """Whether it stands for all addresses of a host, so that one can bind it and can't connect to it."""
        return self.ip is not None and self.ip.is_unspecified

    @property
    def ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return isinstance(self.ip, ipaddress.IPv6Address)

    @property
    def loopback(self) -> bool:
        """Whether other hosts can't reach it. Of names only ``localhost`` is known not to lead elsewhere."""
        return self.host == "localhost" if self.ip is None else self.ip.is_loopback

    @property
    def endpoint(self) -> str:
        """The address without its key."""
        host = bracketed(self.host)
        return f"{self.scheme}://{host}" if self.port is None else f"{self.scheme}://{host}:{self.port}"

    def with_port(self, port: int) -> Address:
        """The same host with another port."""
        return replace(self, port=port)

    def with_key(self, key: str) -> Address:
        """The same place, where the owner of ``key`` has to be."""
        return replace(self, key=key)

    def looked_up(self, found: Sequence[tuple[Any, ...]]) -> Address:
        """The address with its name replaced by what ``getaddrinfo`` found for it, IPv4 first.

        One of them, since a ZeroMQ socket with two connections deals its frames out among both; and IPv4
        because a server on ``localhost`` or on a dual-stack host nearly always listens there.
        """
        four_first = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
        return replace(self, host=four_first[0][4][0])

    def __str__(self) -> str:
        return f"{self.endpoint}#{self.key}" if self.key else self.endpoint


def bracketed(host: str) -> str:
    """A host as it stands before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def host_and_port(text: str) -> tuple[str, int]:
    """``host:port`` taken apart, without the brackets of an IPv6 address.

    Raises:
        ValueError: It is none.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not host:port")
    return host, int(port)


def canonical(address: str) -> str:
    """The address in the form in which addresses are compared: its key as 64 digits in lower case.

    People also write fingerprints as OpenSSL does. What is malformed is left for ``Address.parse`` to refuse.
    """
    place, sharp, key = address.partition("#")
    return f"{place}#{key.replace(':', '').lower()}" if sharp else address


def bindable(bind: str, advertise: str | None, scheme: str) -> tuple[Address, Address | None]:
    """Where to bind, and what peers are told where that is something else, taken apart and checked.

    Raises:
        ValueError: An address is malformed, has a key, or is none that a peer can reach.
    """
    here, told = well_formed(bind, advertise, scheme)
    if here.any_host and told is None:
        raise ValueError(f"{bind!r} is no address that a peer can reach: pass advertise= one that is")
    return here, told


def well_formed(bind: str, advertise: str | None, scheme: str) -> tuple[Address, Address | None]:
    """The same, also where ``advertise`` is missing.

    Raises:
        ValueError: An address is malformed, has a key, or is not to be advertised.
    """
    here = Address.parse(bind, scheme)
    told = None if advertise is None else Address.parse(advertise, scheme)
    if here.port is None:
        raise ValueError(f"{bind!r} has no port; port 0 takes a free one")
    if here.key or (told and told.key):
        raise ValueError(f"{bind!r}: keys= says whose address it is")
    if told is not None and told.any_host:
        raise ValueError(f"advertise={advertise!r} is no address that a peer can reach")
    return here, told


def reachable(address: str, scheme: str) -> Address:
    """A peer's address, taken apart and checked.

    Raises:
        ValueError: It is malformed, or none to connect to.
    """
    peer = Address.parse(address, scheme)
    if not peer.port or peer.any_host:
        raise ValueError(f"{address!r} is no address to connect to")
    return peer
