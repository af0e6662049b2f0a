"""Addresses of the control plane over TCP: ``tcp://host:port``, checked before anything is opened."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["TcpAddress"]

_LABEL = r"\w(?:[\w-]{0,61}\w)?"
_PATTERN = re.compile(
    rf"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>\*|{_LABEL}(?:\.{_LABEL})*))(?::(?P<port>[0-9]{{1,5}}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (a name, an IPv4 or an IPv6 address) and a port; ``str`` gives the address back."""

    host: str  # without the brackets that IPv6 has in the address; "*" is written out
    port: int | None  # None: none was given; 0: any that is free

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """Take an address apart.

        Raises:
            ValueError: It isn't of the form ``tcp://host:port``; IPv6 goes in brackets.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not tcp://host:port (an IPv6 host goes in brackets)")
        host, port = match["six"] or match["host"], match["port"]
        if port is not None and int(port) > 0xFFFF:
            raise ValueError(f"{text!r}: there is no port {port}")
        address = cls("0.0.0.0" if host == "*" else host, None if port is None else int(port))  # noqa: S104
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

    def with_port(self, port: int) -> TcpAddress:
        """The same host with another port."""
        return replace(self, port=port)

    def looked_up(self, found: Sequence[tuple[Any, ...]]) -> TcpAddress:
        """The address with its name replaced by what ``getaddrinfo`` found for it, IPv4 first.

        One of them, since a ZeroMQ socket with two connections deals its frames out among both; and IPv4
        because a server on ``localhost`` or on a dual-stack host nearly always listens there.
        """
        four_first = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
        return replace(self, host=four_first[0][4][0])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}" if self.port is None else f"tcp://{host}:{self.port}"
