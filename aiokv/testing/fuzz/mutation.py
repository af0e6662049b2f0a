"""Bytes that are almost right: genuine ones with bits, lengths, fields and types changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

__all__ = ["Mutator"]

#: Where ranges of integers end.
_NUMBERS = (
    0, 1, -1, 2, 7, 16, 255, 256, 1023, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**47, 2**48 - 1,
    2**48, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip

#: Starts of values in MessagePack that promise more than follows, or that nobody uses.
_HEADS = (
    b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xde\xff\xff", b"\xc1",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd6\xff\0\0\0\x01",
    b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xdd\x7f\xff\xff\xff", b"\xdd\x00\xff\xff\xff", b"\xc6\x7f\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
)  # fmt: skip

_TEXTS = (
    "",
    "\0",
    "tcp://",
    "memory://a",
    "tcp://0.0.0.0:0",
    "x" * 64,
    "x" * 65,
    "x" * 257,
    "é" * 300,
    "\U0001f600",
)

#: Levels of nesting at most.
_DEEPEST = 5000


class Mutator:
    """Draws what is changed, and how.

    Args:
        chance: Decides everything.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    # -- bytes

    def noise(self, most: int = 400) -> bytes:
        """Random bytes, mostly few."""
        return self.chance.randbytes(int(self.chance.random() ** 3 * most))

    def spoil(self, data: bytes, other: bytes = b"") -> bytes:
        """Bytes with one to three changes that know nothing of their form.

        Args:
            data: What is changed.
            other: What a part may be taken from.
        """
        ways: Sequence[Callable[[bytes, bytes], bytes]] = (
            self._flip, self._cut, self._drop, self._insert, self._promise, self._splice, self._repeat,
        )  # fmt: skip
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            data = self.chance.choice(ways)(data, other)
        return data

    def _at(self, data: bytes) -> int:
        return self.chance.randrange(len(data) + 1)

    def _flip(self, data: bytes, _: bytes) -> bytes:
        if not data:
            return data
        at = self.chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.chance.randrange(8)]) + data[at + 1 :]

    def _cut(self, data: bytes, _: bytes) -> bytes:
        return data[: self._at(data)]

    def _drop(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + data[at + self.chance.randrange(1, 9) :]

    def _insert(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self.noise(40) + data[at:]

    def _promise(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self.chance.choice(_HEADS) + data[at + self.chance.randrange(9) :]

    def _splice(self, data: bytes, other: bytes) -> bytes:
        return data[: self._at(data)] + other[self._at(other) :]

    def _repeat(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        piece = data[at : at + self.chance.randrange(1, 33)]
        return data[:at] + piece * self.chance.choice((2, 3, 100)) + data[at:]

    # -- values

    def change(self, data: bytes) -> bytes:
        """A value in MessagePack with one to three of the values in it changed; it stays MessagePack."""
        value = msgspec.msgpack.decode(data)
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            value = self._inside(value)
        return msgspec.msgpack.encode(value)

    def change_body(self, frame: bytes) -> bytes:
        """A frame with a good header, and messages of which one to three values were changed."""
        value = msgspec.msgpack.decode(frame)
        body = value[-1]
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            if body and isinstance(body, list) and self.chance.random() < 0.9:
                at = self.chance.randrange(len(body))
                body[at] = self._inside(body[at])
            else:
                body = self._inside(body)
        value[-1] = body
        return msgspec.msgpack.encode(value)

    def _inside(self, value: object) -> object:
        """Change a value, or one somewhere inside of it."""
        pick = self.chance.random()
        if isinstance(value, list) and value and pick < 0.96:
            at = self.chance.randrange(len(value))
            if pick < 0.84:  # most values are deep inside
                value[at] = self._inside(value[at])
            elif pick < 0.87:
                del value[at]
            elif pick < 0.90:
                value.insert(at, value[self.chance.randrange(len(value))])
            elif pick < 0.93:
                other = self.chance.randrange(len(value))
                value[at], value[other] = value[other], value[at]
            else:
                value.append(self.anything())
            return value
        if isinstance(value, dict) and value and pick < 0.9:
            key = self.chance.choice(list(value))
            value[key] = self._inside(value[key])
            return value
        return self._instead(value)

    def _instead(self, value: object) -> object:
        """Another value, mostly of the same type."""
        if self.chance.random() < 0.1:
            return self.anything()
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            near = self.chance.choice(
                (value + 1, value - 1, value * 2, value ^ 1 << self.chance.randrange(48))
            )
            found = self.chance.choice((near, self.chance.choice(_NUMBERS)))
            return min(max(found, -(2**63)), 2**64 - 1)
        if isinstance(value, bytes):
            return self.spoil(value)[: 1 << 16]
        if isinstance(value, str):
            return self.chance.choice((value + "x", value[:-1], value * 2, self.chance.choice(_TEXTS)))
        return self.anything()

    def anything(self) -> object:
        """A value of any type."""
        kind = self.chance.randrange(8)
        if kind == 0:
            return self.chance.choice(_NUMBERS)
        if kind == 1:
            return self.noise()
        if kind == 2:
            return self.chance.choice(_TEXTS)
        if kind == 3:
            return [self.chance.choice(_NUMBERS)] * self.chance.choice((0, 1, 2, 100))
        if kind == 4:
            return {self.chance.choice(_TEXTS): None}
        if kind == 5:
            return msgspec.Raw(b"\x91" * self.chance.randrange(1, _DEEPEST) + b"\xc0")
        return self.chance.choice((None, True, 1.5, float("inf"), msgspec.msgpack.Ext(7, b"x")))
