"""Names of blocks in the form in which they go to another process: equal exactly where the names are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiokv.errors import CapacityError
from aiokv.offload.policies import Key

__all__ = ["MOST_BYTES", "decoded", "encoded"]

#: Of one name.
MOST_BYTES = 1024
#: No msgpack value begins with this: an integer follows that has more bits than msgpack's.
_LONG = b"\xc1"
_TUPLE = b"\xdd"


def encoded(keys: Sequence[Key]) -> list[bytes]:
    """Each name as bytes: msgpack, but for integers of more than 64 bits.

    Raises:
        CapacityError: One is too long.
        TypeError: One is neither bytes, str, int nor a tuple of these: it means nothing to others.
    """
    encode = msgspec.msgpack.encode
    found = [encode(key) if type(key) is bytes else _encoded(key) for key in keys]
    for each in found:
        if len(each) > MOST_BYTES:
            raise CapacityError(f"a hash takes {len(each)} bytes, and at most {MOST_BYTES} in a shared pool")
    return found


def _encoded(key: object) -> bytes:
    if isinstance(key, int):
        number = int(key)  # True is 1, as it is for a dict
        if -(2**63) <= number < 2**64:
            return msgspec.msgpack.encode(number)
        return _LONG + number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)
    if isinstance(key, bytes):
        return msgspec.msgpack.encode(bytes(key))
    if isinstance(key, str):
        try:
            return msgspec.msgpack.encode(str(key))
        except UnicodeEncodeError as error:
            raise TypeError(f"in a shared pool a hash that is text has no surrogates: {key!r:.80}") from error
    if isinstance(key, tuple):
        # With its length, and each part tells its own.
        return _TUPLE + len(key).to_bytes(4, "big") + b"".join(_part(each) for each in key)
    raise TypeError(f"in a shared pool a hash is bytes, str, int, or a tuple of these, not {key!r:.80}")


def _part(key: object) -> bytes:
    made = _encoded(key)
    return len(made).to_bytes(4, "big") + made


def decoded(name: bytes) -> Key:
    """The name that ``encoded`` made bytes of.

    Raises:
        ValueError: It made none such.
    """
    if name[:1] == _LONG:
        return int.from_bytes(name[1:], "big", signed=True)
    if name[:1] != _TUPLE:
        found: Key = msgspec.msgpack.decode(name)
        return found
    parts: list[Key] = []
    at = 5
    while at < len(name):
        start = at + 4
        at = start + int.from_bytes(name[at:start], "big")
        parts.append(decoded(name[start:at]))
    return tuple(parts)
