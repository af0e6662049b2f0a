"""The pieces that an engine is made of, by name or address; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from aiokv.control.base import Channel
from aiokv.transports.base import Transport

__all__ = ["TRANSPORTS", "channel_at", "host_of", "transports_named"]

#: Transports that an engine uses by default, best first.
TRANSPORTS = ("shm", "cma", "tcp")


def channel_at(bind: str, advertise: str | None) -> Channel:
    """The control channel for an address."""
    # Imported here, so that importing aiokv doesn't import zmq.
    from aiokv.control.zmq import ZmqChannel

    return ZmqChannel(bind, advertise=advertise)


def transports_named(wanted: Sequence[str | Transport] | None) -> list[Transport]:
    """Transports by name, or as the caller made them; all by default."""
    names = TRANSPORTS if wanted is None else wanted
    if not names:
        raise ValueError("at least one transport must be allowed")
    return [_made(each) if isinstance(each, str) else each for each in names]


def _made(name: str) -> Transport:
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
    raise ValueError(f"there is no transport {name!r}; there are {', '.join(TRANSPORTS)}")


def host_of(address: str) -> str:
    """Host of a control address, where data ports listen too; loopback where it has none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]") if address.startswith("tcp://") and port else "127.0.0.1"
