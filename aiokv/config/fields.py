"""What each field of a ``Config`` may be, and the form in which it is kept."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiokv.control.keys import checked_key
from aiokv.engine.choices import checked_ports, checked_streams, checked_transports
from aiokv.proto.settings import SECOND

__all__ = ["BYTES", "COUNTS", "DURATIONS", "READ", "TLS", "from_text"]

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


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is true or false, not {value!r}")
    return value


def _path(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is the path of a file, not {value!r}")
    if value is not None and not os.fspath(value):
        raise ValueError(f"{name} is the path of a file, not empty; leave it out for none")
    return None if value is None else os.fsdecode(value)


def _allowed(name: str, value: object) -> tuple[str, ...] | str | None:
    if value is None or isinstance(value, os.PathLike):
        return _path(name, value)
    if isinstance(value, str):
        return _allowed_text(name, value)
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name} is a list of keys, or the path of a file with them, not {value!r}")
    return tuple(_key(name, each) for each in value)


def _allowed_text(name: str, text: str) -> tuple[str, ...] | str:
    """Keys with commas between them; or the path of a file, which may have commas, too, and exists then."""
    words = [each.strip() for each in text.split(",") if each.strip()]
    try:
        return tuple(checked_key(each) for each in words) or _path(name, text) or ""
    except ValueError:
        if "," not in text or Path(text).exists():
            return _path(name, text) or ""
    return tuple(_key(name, each) for each in words)  # says which of them is none


def _key(name: str, text: str) -> str:
    try:
        return checked_key(text)
    except ValueError:
        raise ValueError(f"{name} lists keys of 64 hexadecimal digits, not {text!r}") from None


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
            ports = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ValueError(f"{name} is ports and ranges of them, 7000-7009, not {value!r}") from None
        if not ports:  # none would mean any
            raise ValueError(f"{name} has the range {each!r}, which runs backwards")
        if len(ports) > 1 << 16:  # not worth its memory
            raise ValueError(f"{name} lists ports from 1 to 65535, not {each!r}")
        found.extend(ports)
    return checked_ports(found)


DURATIONS = ("contact", "heartbeat", "liveness", "lease", "drain", "close", "tombstone")
BYTES = ("chunk", "window", "staging", "pinned", "nccl_staging")
COUNTS = ("tombstones", "parked_per_peer", "peers")
TLS = ("tls_certificate", "tls_key", "tls_ca")
_FLAGS = frozenset({"insecure"})
#: Fields whose variables hold a number, and names with commas.
_INTEGERS = frozenset({*COUNTS, "tcp_streams"})
_LISTS = frozenset({"transports"})

#: For each field that isn't kept just as it is given: what reads it. Raises TypeError, ValueError.
READ: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "keys": _path,
        "allow": _allowed,
        **dict.fromkeys(TLS, _path),
        **dict.fromkeys(_FLAGS, _flag),
        "transports": _names,
        "data_ports": _ports,
        "tcp_streams": lambda _, value: checked_streams(value),
        **dict.fromkeys(DURATIONS, _duration),
        **dict.fromkeys(BYTES, _size),
        **dict.fromkeys(COUNTS, _integer),
    }
)


def from_text(variable: str, field: str, text: str) -> bool | int | str | list[str]:
    """A variable's value, for the field that it is named after.

    Raises:
        ValueError: It is no value of that field; the message names the variable.
    """
    if field in _INTEGERS:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{variable}: {field} is an integer, not {text!r}") from None
    if field in _FLAGS:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{variable}: {field} is true or false, not {text!r}")
        return text.lower() in ("true", "1")
    if field in _LISTS:
        return [each.strip() for each in text.split(",") if each.strip()]
    return text
