"""The pieces that an engine is made of, by name or address; each is imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from aiokv.control.address import Address
from aiokv.control.choice import CHANNELS, scheme_of
from aiokv.device.offloop import off_loop
from aiokv.proto.settings import Settings
from aiokv.transports.base import Transport
from aiokv.transports.handshake import MAX_STREAMS, STREAMS

__all__ = [
    "CUDA_TRANSPORTS",
    "TRANSPORTS",
    "checked_ports",
    "checked_streams",
    "checked_transports",
    "host_of",
    "imported",
    "transports_named",
]

#: Transports that an engine uses by default, best first: with a cache in host memory, and on a GPU.
TRANSPORTS = ("shm", "cma", "tcp")
CUDA_TRANSPORTS = ("cuda_ipc", "nccl", "shm", "tcp")
#: Those that take one of ``data_ports`` each.
_LISTENING = ("nccl", "tcp")
_NAMES = tuple(dict.fromkeys(TRANSPORTS + CUDA_TRANSPORTS))


async def imported(chosen: Sequence[str | Transport], bind: str | None, kind: str = "host") -> None:
    """Import what is needed off the loop, which zmq alone would hold for 50 ms and more.

    Args:
        chosen: The transports.
        bind: The address for which ``control.choice.channel_at`` will be called; None: it won't be.
        kind: Of device memory, that the transports are for.
    """
    modules = [f"aiokv.transports.{each}" for each in chosen if isinstance(each, str)]
    if kind == "cuda" and "shm" in chosen:
        modules.append("aiokv.transports.staging_shm")
    if bind is not None:
        modules.append(CHANNELS[scheme_of(bind)])
    if missing := [name for name in modules if name not in sys.modules]:
        await off_loop(lambda: [import_module(name) for name in missing], "aiokv-import")


def checked_transports(wanted: Sequence[str | Transport] | None, kind: str = "") -> list[str | Transport]:
    """Names of transports, and transports that the caller made; by default all there are.

    Args:
        wanted: The transports.
        kind: Of device memory that they are for; empty where that isn't known yet.

    Raises:
        TypeError: It is no list, or not of names and transports.
        ValueError: It is empty, has one twice, one that there isn't, or none for such memory.
    """
    if wanted is None:
        return list(CUDA_TRANSPORTS if kind == "cuda" else TRANSPORTS)
    if isinstance(wanted, str):  # a sequence, too, but of letters
        raise TypeError(f"transports is a list of names, not the one name {wanted!r}")
    if not isinstance(wanted, Sequence):
        raise TypeError(f"transports is a list of names or transports, not {wanted!r}")
    if not wanted:
        raise ValueError("transports is empty: at least one transport must be allowed")
    names = [_name(each) for each in wanted]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"transports must name each once, not {name!r} {names.count(name)} times")
    fitting = {"host": TRANSPORTS, "cuda": CUDA_TRANSPORTS}.get(kind, _NAMES)
    if all(isinstance(each, str) and each not in fitting for each in wanted):
        where = "on a GPU" if kind == "cuda" else "in host memory"
        raise ValueError(f"transports {names} can't serve a cache {where}; {', '.join(fitting)} can")
    return list(wanted)


def _name(transport: str | Transport) -> str:
    if isinstance(transport, str):
        if transport not in _NAMES:
            raise ValueError(f"there is no transport {transport!r}; there are {', '.join(_NAMES)}")
        return transport
    methods = all(hasattr(transport, name) for name in ("describe", "start", "connect"))
    if not methods or isinstance(transport, type):
        raise TypeError(f"transports has {transport!r}, which is neither a name nor a transport")
    return transport.name


def checked_ports(ports: Sequence[int], chosen: Sequence[str | Transport] = ()) -> tuple[int, ...]:
    """Ports that data connections may come in at; none: any that is free.

    Args:
        ports: The ports.
        chosen: The transports that share them, where they are known.

    Raises:
        TypeError: They are no list of integers.
        ValueError: One is none to listen at, or they are too few.
    """
    if isinstance(ports, str | bytes) or not isinstance(ports, Sequence):
        raise TypeError(f"data_ports is a list of port numbers, not {ports!r}")
    for port in ports:
        if not isinstance(port, int) or isinstance(port, bool):
            raise TypeError(f"data_ports lists port numbers, not {port!r}")
        if not 0 < port < 2**16:
            raise ValueError(f"data_ports lists ports from 1 to 65535, not {port}")
    listening = [each for each in chosen if each in _LISTENING]
    if 0 < len(set(ports)) < len(listening):
        raise ValueError(
            f"data_ports has {len(set(ports))} port, and {' and '.join(map(str, listening))} take one each: "
            f"list {len(listening)} or more, or leave one of them out of transports"
        )
    return tuple(ports)


def checked_streams(streams: int) -> int:
    """Connections of each ``tcp`` link.

    Raises:
        TypeError: It is no integer.
        ValueError: There can't be so many.
    """
    if not isinstance(streams, int) or isinstance(streams, bool):
        raise TypeError(f"tcp_streams is an integer, not {streams!r}")
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"tcp_streams is a number from 1 to {MAX_STREAMS}, not {streams}")
    return streams


def transports_named(
    wanted: Sequence[str | Transport] | None,
    *,
    ports: Sequence[int] = (),
    advertise: str | None = None,
    streams: int = STREAMS,
    kind: str = "host",
    settings: Settings | None = None,
) -> list[Transport]:
    """Transports by name, or as the caller made them; see ``checked_transports``.

    Args:
        wanted: The transports.
        ports: Where ``tcp`` and ``nccl`` may listen; none: at any free port.
        advertise: Control address that peers are told, whose host leads to ``tcp``, too.
        streams: Connections of each ``tcp`` link.
        kind: Of device memory, that they are for.
        settings: How much staging memory they have.
    """
    settings = settings or Settings()
    host = None if advertise is None else Address.parse(advertise, advertise.partition("://")[0]).host
    return [
        _made(each, ports, host, streams, kind, settings) if isinstance(each, str) else each
        for each in checked_transports(wanted, kind)
    ]


def _made(
    name: str, ports: Sequence[int], host: str | None, streams: int, kind: str, settings: Settings
) -> Transport:
    staging, pinned = settings.staging_bytes, settings.pinned_bytes
    match name:
        case "shm" if kind == "cuda":
            from aiokv.transports.staging_shm import StagedShmTransport

            return StagedShmTransport(staging, pinned)
        case "shm":
            from aiokv.transports.shm import ShmTransport

            return ShmTransport()
        case "cma":
            from aiokv.transports.cma import CmaTransport

            return CmaTransport()
        case "cuda_ipc":
            from aiokv.transports.cuda_ipc import CudaIpcTransport

            return CudaIpcTransport()
        case "nccl":
            from aiokv.transports.nccl import NcclTransport

            return NcclTransport(ports, host, staging=settings.nccl_staging_bytes)
        case _:
            from aiokv.transports.tcp import TcpTransport

            return TcpTransport(ports, host, streams=streams, staging=staging, pinned=pinned)


def host_of(address: str) -> str:
    """Host of a control address, where data ports listen too; loopback where it has none."""
    scheme = address.partition("://")[0]
    return Address.parse(address, scheme).host if scheme in CHANNELS else "127.0.0.1"
