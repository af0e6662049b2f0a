"""The control channel for an address, by its scheme; each kind is imported when it is used."""

from __future__ import annotations

from types import MappingProxyType

from aiokv.control.access import Access
from aiokv.control.address import well_formed
from aiokv.control.base import Channel

__all__ = ["CHANNELS", "channel_at", "checked_binding", "scheme_of"]

#: The module of each channel, by the scheme of its addresses.
CHANNELS = MappingProxyType(
    {"tcp": "aiokv.control.zmq", "stream": "aiokv.control.streams", "tls": "aiokv.control.streams"}
)
_ANYBODY = Access(keys=None, allow=None, tls=None)


def checked_binding(bind: str, advertise: str | None) -> None:
    """Refuse what no channel can listen at, without importing a channel.

    Raises:
        TypeError: An address is no string.
        ValueError: An address is malformed. Whether peers can reach it is for ``checked_access``.
    """
    for what, address in (("bind", bind), ("advertise", advertise)):
        if not isinstance(address, str) and (address is not None or what == "bind"):
            raise TypeError(f"{what} is an address, tcp://host:port, not {address!r}")
    if bind.partition("://")[0] not in CHANNELS:
        known = [f"{each}://host:port" for each in CHANNELS]
        raise ValueError(f"{bind!r} is not {', '.join(known[:-1])} or {known[-1]}")
    well_formed(bind, advertise, scheme_of(bind))


def scheme_of(address: str) -> str:
    """The scheme of an address; the first of them where it has another or none."""
    found = address.partition("://")[0]
    return found if found in CHANNELS else "tcp"


def channel_at(bind: str, advertise: str | None, access: Access = _ANYBODY) -> Channel:
    """The control channel for an address, which ``checked_access`` has found right."""
    if scheme_of(bind) != "tcp":
        from aiokv.control.streams import StreamChannel

        return StreamChannel(bind, advertise=advertise, tls=access.tls, allow=access.allow)
    from aiokv.control.zmq import ZmqChannel

    return ZmqChannel(bind, advertise=advertise, keys=access.keys, allow=access.allow or ())
