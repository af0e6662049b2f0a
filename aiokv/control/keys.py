"""Keys of the control plane over ZeroMQ (CURVE): who an engine is, and whom it lets in.

A key is written as 64 hexadecimal digits, in files, in allow-lists and in addresses alike.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

__all__ = ["Keys", "checked_key"]

_SECRET, _PUBLIC, _ALLOWED = "aiokv.key", "aiokv.pub", "allowed"


def checked_key(text: str) -> str:
    """The key, if it is one.

    Raises:
        ValueError: It isn't 64 hexadecimal digits. What it is isn't said: it may be a secret one.
    """
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("a key is 64 hexadecimal digits in lower case")
    return text


@dataclass(frozen=True, slots=True)
class Keys:
    """An engine's own pair of keys. It shows and prints the public one only.

    Attributes:
        secret: Who has it passes for this engine.
        public: What peers list in ``allow=``, and what the engine's address names.

    Raises:
        ValueError: ``secret`` is no key.
    """

    secret: str = field(repr=False)
    public: str = field(init=False)

    def __post_init__(self) -> None:
        import zmq
        from zmq.utils import z85

        raw = zmq.curve_public(z85.encode(bytes.fromhex(checked_key(self.secret))))
        object.__setattr__(self, "public", z85.decode(raw).hex())

    @classmethod
    def generate(cls) -> Self:
        """A new pair."""
        import zmq
        from zmq.utils import z85

        return cls(z85.decode(zmq.curve_keypair()[1]).hex())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a secret key. Blocks: not for a running loop.

        Args:
            path: The file, or the folder that ``save`` made.

        Raises:
            OSError: It can't be read.
            PermissionError: Others than its owner can read or write it, too.
            ValueError: There is no key in it.
        """
        file = _within(path, _SECRET)
        with file.open(encoding="ascii", errors="replace") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(f"{file} is open to others (mode {mode:04o}): chmod 600 {file}")
            found = _listed(opened)
        if len(found) != 1:
            raise ValueError(f"{file}: {len(found)} keys where there should be one")
        try:
            return cls(found[0])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``aiokv.key``, which only its owner can read, and ``aiokv.pub``, which is for the peers.

        Raises:
            FileExistsError: There is a key already; it is not overwritten.
            OSError: They can't be written.
        """
        where = Path(folder)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = (
            (_SECRET, 0o600, f"# secret: who has this passes for {self.public}\n{self.secret}\n"),
            (_PUBLIC, 0o644, f"{self.public}\n"),
        )
        for name, _, _ in files:  # before either is written, so that no half of a pair is left
            if (where / name).exists():
                raise FileExistsError(errno.EEXIST, "there is a key already, which stays", str(where / name))
        for name, mode, text in files:
            descriptor = os.open(where / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123 (it is open)
                file.write(text)
        return where

    @staticmethod
    def listed(path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Read public keys, for ``allow=``: one a line; what follows it, and after ``#``, is for people.

        Blocks: not for a running loop.

        Args:
            path: The file, or a folder with a file ``allowed``.

        Raises:
            OSError: It can't be read.
            ValueError: A line is no key; it is named by its number.
        """
        file = _within(path, _ALLOWED)
        found = _listed(file.read_text(encoding="utf-8").splitlines())
        for number, key in enumerate(found, 1):
            try:
                checked_key(key)
            except ValueError as error:
                raise ValueError(f"{file}, key {number}: {error}") from None
        return tuple(found)


def _within(path: str | os.PathLike[str], name: str) -> Path:
    given = Path(path)
    return given / name if given.is_dir() else given


def _listed(lines: Iterable[str]) -> list[str]:
    """The first word of each line that has one."""
    words = [line.partition("#")[0].split() for line in lines]
    return [each[0] for each in words if each]
