"""How an engine is set up, under the same names in Python, in TOML, in the environment and in JSON.

    aiokv.Config(bind="tcp://10.0.0.5:7000", transports=["shm", "tcp"], liveness="5s")

    [aiokv]                                             # Config.from_toml("engine.toml")
    bind = "tcp://10.0.0.5:7000"
    transports = ["shm", "tcp"]
    liveness = "5s"

    AIOKV_BIND=tcp://10.0.0.5:7000 AIOKV_TRANSPORTS=shm,tcp AIOKV_LIVENESS=5s     # Config.from_env()

``config.engine(cache)`` makes the engine. Nothing is read unless it is asked for: an engine that is
made without a ``Config`` looks at no file and no variable. What can't be meant is refused at once,
with the name of the field, and of the file or variable where it stands.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from aiokv.device.cache import KVCache
from aiokv.engine.choices import checked_binding, checked_ports, checked_streams, checked_transports
from aiokv.engine.engine import TransferEngine
from aiokv.engine.stopwatch import Trace
from aiokv.proto.settings import SECOND, Settings
from aiokv.transports.handshake import STREAMS

__all__ = ["Config"]

_PREFIX = "AIOKV_"
_DEFAULT = Settings()

_AMOUNT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[A-Za-zµ]*)", re.ASCII)
#: Nanoseconds in each unit of time.
_TIMES = MappingProxyType({"us": 10**3, "ms": 10**6, "s": SECOND, "min": 60 * SECOND, "h": 3600 * SECOND})
#: Bytes in each unit of size.
_SIZES = MappingProxyType(
    {
        "B": 1,
        **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMG", 1)},
        **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMG", 1)},
    }
)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an engine is told but for its cache; see ``TransferEngine`` and ``Settings``.

    Times are seconds, or text with a unit: ``2``, ``0.5``, ``"500ms"``, ``"2s"``, ``"1min"``. Sizes
    are bytes, or text with a unit: ``2097152``, ``"2MiB"``, ``"2MB"``. They are kept as seconds and
    as bytes.

    Attributes:
        bind: Address of the control channel; port 0 takes a free one.
        advertise: What peers are told instead of the bound address.
        transports: Names of the data paths that may be used, best first; None: all that fit.
        data_ports: Ports that data connections may come in at; none: any that is free. Text may
            give a range: ``"7000-7009"``.
        tcp_streams: Connections of each ``tcp`` link.
        contact: How long a peer may take to answer at first contact.
        heartbeat: How often peers with a live part in common ask each other for a sign of life.
        liveness: Silence after which such a peer is given up.
        lease: How long a one-sided reader may read on without hearing that it still may.
        drain: After a part was given up: how long until nothing can touch its blocks any more.
        close: On closing: how long to wait until peers acknowledged the last message.
        tombstone: How long an ended transfer is remembered.
        tombstones: Ended transfers remembered at most.
        parked_per_peer: Grants and offers of one peer that wait for their other half, at most.
        peers: Peers at most.
        chunk: Bytes that one submitted copy moves at most.
        window: Bytes of submitted copies that may be unfinished.

    Raises:
        TypeError: A field of the wrong kind; the message names it.
        ValueError: One that can't be meant, or fields that contradict each other.
    """

    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    transports: Sequence[str] | None = None
    data_ports: Sequence[int] | str = ()
    tcp_streams: int = STREAMS
    contact: float | str = _DEFAULT.contact_ns / SECOND
    heartbeat: float | str = _DEFAULT.heartbeat_ns / SECOND
    liveness: float | str = _DEFAULT.liveness_ns / SECOND
    lease: float | str = _DEFAULT.lease_ns / SECOND
    drain: float | str = _DEFAULT.drain_ns / SECOND
    close: float | str = _DEFAULT.close_ns / SECOND
    tombstone: float | str = _DEFAULT.tombstone_ns / SECOND
    tombstones: int = _DEFAULT.tombstones
    parked_per_peer: int = _DEFAULT.parked_per_peer
    peers: int = _DEFAULT.peers
    chunk: int | str = _DEFAULT.chunk_bytes
    window: int | str = _DEFAULT.window_bytes

    def __post_init__(self) -> None:
        """Bring all fields into the form in which they are kept, and refuse what can't be meant."""
        for name in self.__struct_fields__:
            if (read := _READ.get(name)) is not None:
                msgspec.structs.force_setattr(self, name, read(name, getattr(self, name)))
        checked_binding(self.bind, self.advertise)
        _settings(self)

    @property
    def settings(self) -> Settings:
        """The timers and bounds."""
        return _settings(self)

    def engine(self, cache: KVCache, *, trace: Trace | None = None) -> TransferEngine:
        """An engine so set up, not yet entered.

        Args:
            cache: The registered memory.
            trace: Records what its transfers do.
        """
        return TransferEngine(
            cache,
            bind=self.bind,
            advertise=self.advertise,
            transports=self.transports,
            data_ports=checked_ports(self.data_ports),  # type: ignore[arg-type]
            tcp_streams=self.tcp_streams,
            settings=self.settings,
            trace=trace,
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], base: Config | None = None) -> Config:
        """Read the table ``[aiokv]`` of a file. Blocks: not for a running loop.

        Args:
            path: The file.
            base: What the fields are that don't stand there; by default their defaults.

        Raises:
            OSError: It can't be read.
            ValueError: It is no TOML, has no such table, or something in it can't be meant.
        """
        import tomllib

        where = os.fspath(path)
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: {error}") from error
        table = tables.get("aiokv")
        if table is None or not hasattr(table, "items"):
            raise ValueError(f"{where}: there is no table [aiokv]")
        return cls.from_mapping(table, base, source=where)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, base: Config | None = None) -> Config:
        """Read the variables ``AIOKV_BIND``, ``AIOKV_TRANSPORTS=shm,tcp`` and so on, and change none.

        Args:
            environ: The variables; by default those of this process.
            base: What the fields are that have no variable, such as what a file says.

        Raises:
            ValueError: A variable that begins so and is none of a field's, or that can't be meant.
        """
        found = os.environ if environ is None else environ
        values = {name: value for name, value in found.items() if name.startswith(_PREFIX)}
        return _updated(
            base or cls(),
            {name.removeprefix(_PREFIX).lower(): _from_text(name, value) for name, value in values.items()},
            lambda field: _PREFIX + field.upper(),
        )

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], base: Config | None = None, *, source: str = "config"
    ) -> Config:
        """Take fields from what was read elsewhere: JSON, another program's configuration.

        Args:
            mapping: Values by field.
            base: What the other fields are.
            source: What errors call it.

        Raises:
            ValueError: A field that there isn't, or that can't be meant.
        """
        return _updated(base or cls(), mapping, lambda field: f"{source}: {field}")


def _settings(config: Config) -> Settings:
    """The timers and bounds; raises ValueError where they contradict each other."""
    numbers = {f"{name}_ns": round(getattr(config, name) * SECOND) for name in _DURATIONS}
    numbers |= {f"{name}_bytes": getattr(config, name) for name in _BYTES}
    numbers |= {name: getattr(config, name) for name in _COUNTS}
    try:
        return Settings(**numbers)
    except ValueError as error:
        # Its names have units, and so have its numbers.
        text = re.sub(r"\b(\w+)_(?:ns|bytes)\b", r"\1", str(error))
        raise ValueError(f"{text} (times in ns)" if "_ns" in str(error) else text) from error


def _updated(base: Config, values: Mapping[str, Any], where: Callable[[str], str]) -> Config:
    """``base`` with other values; errors say where they came from.

    One after the other, so that the field in question is known; those that belong together last.
    """
    known = Config.__struct_fields__
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {where(near[0]).rpartition(' ')[2]}?" if near else ""
            raise ValueError(f"{where(name)}: there is no such field{hint}")
        try:
            if name in _READ:
                _READ[name](name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where(name)}: {error}") from error
    try:
        return msgspec.structs.replace(base, **values)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = [name for name in values if re.search(rf"\b{name}\b", text)]
        shown = [name for name, value in values.items() if isinstance(value, str) and repr(value) in text]
        meant = named or shown
        raise ValueError(f"{', '.join(map(where, meant or values))}: {error}") from error


def _from_text(variable: str, text: str) -> int | str | list[str]:
    """A variable's value, for the field that it is named after."""
    field = variable.removeprefix(_PREFIX).lower()
    if field in _INTEGERS:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{variable}: {field} is an integer, not {text!r}") from None
    if field in _LISTS:
        return [each.strip() for each in text.split(",") if each.strip()]
    return text


# -- what each field may be


def _duration(name: str, value: object) -> float:
    if isinstance(value, str):
        return _amount(name, value, _TIMES, "2s", default="s") / SECOND
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'{name} is a time in seconds, or text such as "2s", not {value!r}')
    if not math.isfinite(value):
        raise ValueError(f"{name} is a time that ends, not {value!r}")
    return float(value)


def _size(name: str, value: object) -> int:
    if isinstance(value, str):
        found = _amount(name, value, _SIZES, "64MiB", default="B")
        if found != int(found):
            raise ValueError(f"{name} is a whole number of bytes, not {value!r}")
        return int(found)
    return _integer(name, value)


def _amount(name: str, text: str, units: Mapping[str, int], such_as: str, *, default: str) -> float:
    match = _AMOUNT.fullmatch(text.strip())
    unit = (match["unit"] or default) if match else ""
    if match is None or unit not in units:
        known = ", ".join(units)
        raise ValueError(f"{name} is a number with a unit of {known}, such as {such_as!r}, not {text!r}")
    return float(match["number"]) * units[unit]


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an integer, not {value!r}")
    return value


def _names(_: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    found = checked_transports(value)  # type: ignore[arg-type]
    if any(not isinstance(each, str) for each in found):
        raise TypeError("transports in a Config are names; TransferEngine takes others")
    return tuple(map(str, found))


def _ports(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        return checked_ports(value)  # type: ignore[arg-type]
    found: list[int] = []
    for each in filter(None, (part.strip() for part in value.split(","))):
        first, dash, last = each.partition("-")
        try:
            found.extend(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ValueError(f"{name} is ports and ranges of them, 7000-7009, not {value!r}") from None
    return checked_ports(found)


_DURATIONS = ("contact", "heartbeat", "liveness", "lease", "drain", "close", "tombstone")
_BYTES = ("chunk", "window")
_COUNTS = ("tombstones", "parked_per_peer", "peers")
#: Fields whose variables hold a number, and names with commas.
_INTEGERS = frozenset({*_COUNTS, "tcp_streams"})
_LISTS = frozenset({"transports"})

#: For each field that isn't kept just as it is given: what reads it. Raises TypeError, ValueError.
_READ: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "transports": _names,
        "data_ports": _ports,
        "tcp_streams": lambda _, value: checked_streams(value),
        **dict.fromkeys(_DURATIONS, _duration),
        **dict.fromkeys(_BYTES, _size),
        **dict.fromkeys(_COUNTS, _integer),
    }
)
