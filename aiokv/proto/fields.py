"""Fields of what goes over the wire, checked and put into Python's own types when it is made.

Callers bring numpy's integers and strings; msgspec, which checks types when it decodes only, can't encode
them. So each struct that a caller makes passes its fields through here, and what can't be said fails where
it was written and not at a peer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex, cast

import msgspec

__all__ = ["flag", "index", "integer", "integers", "octets", "settle", "text"]


def integer(value: object, name: str) -> int:
    """An integer as Python's own.

    Raises:
        TypeError: It isn't one; True and False aren't, either.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {_shown(value)}")
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {_shown(value)}") from None


def index(value: object, name: str) -> int:
    """Whatever passes for an integer (``operator.index``), as Python's own.

    Raises:
        TypeError: It isn't one.
    """
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        raise TypeError(f"{name} is an integer, not {value!r}") from None


def integers(values: object, name: str, count: int | None = None) -> tuple[int, ...]:
    """Integers as a tuple of Python's own.

    Raises:
        TypeError: It isn't a series of integers.
        ValueError: There are more or fewer than ``count``.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | bytearray):
        raise TypeError(f"{name} must be a tuple of integers, not {_shown(values)}")
    found = tuple(integer(value, name) for value in values)
    if count is not None and len(found) != count:
        raise ValueError(f"{name} must be {count} integers, got {found}")
    return found


def text(value: object, name: str) -> str:
    """A string as Python's own.

    Raises:
        TypeError: It isn't a string.
        ValueError: It can't be encoded as UTF-8.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {_shown(value)}")
    try:
        return value.encode().decode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has no form in UTF-8: {value!r}") from None


def octets(value: object, name: str) -> bytes:
    """Bytes as Python's own.

    Raises:
        TypeError: They aren't ``bytes``.
    """
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, not {_shown(value)}")
    return bytes(value)


def flag(value: object, name: str) -> bool:
    """True or False.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {_shown(value)}")
    return value


def settle(struct: msgspec.Struct, **fields: object) -> None:
    """Put checked fields in place; for ``__post_init__`` of a frozen struct, before anybody has it."""
    for name, value in fields.items():
        msgspec.structs.force_setattr(struct, name, value)


def _shown(value: object) -> str:
    return f"{type(value).__qualname__} {value!r:.80}"
