"""Keys of the control plane over ZeroMQ (CURVE): who an engine is, and whom it lets in.

A key is written as 64 hexadecimal digits, in files, in allow-lists and in addresses alike, and so is the
fingerprint of a certificate, which stands for a key where there is TLS.
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

#: What files of aiokv's begin with, so that nobody takes one for the other: both keys look the same.
_SECRET_MARK, _PUBLIC_MARK = "# secret", "# public"

#: As keys are written here, or as OpenSSL writes fingerprints of certificates.
_KEY = re.compile(r"[0-9A-Fa-f]{2}(?::?[0-9A-Fa-f]{2}){31}")


def checked_key(text: str) -> str:
    """The key, if it is one, in the form in which keys are compared: 64 digits in lower case.

    The fingerprint of a certificate may also come as OpenSSL writes it: ``50:60:8D:...``.

    Raises:
        ValueError: It isn't 64 hexadecimal digits. What it is isn't said: it may be a secret one.
    """
    if not isinstance(text, str) or not _KEY.fullmatch(text):
        raise ValueError("a key is 64 hexadecimal digits")
    return text.replace(":", "").lower()


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

        object.__setattr__(self, "secret", checked_key(self.secret))
        raw = zmq.curve_public(z85.encode(bytes.fromhex(self.secret)))
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
            ValueError: There is no key in it, or it doesn't say that it is a secret one (by a line
                ``# secret``, as ``save`` writes it): the public one, which every peer has, looks the same.
        """
        file = _within(path, _SECRET)
        with file.open(encoding="ascii", errors="replace") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            lines = opened.readlines()
        if _marked(lines, _PUBLIC_MARK) or file.suffix == ".pub":
            raise ValueError(f"{file}: this is a public key; the secret one is {_SECRET} beside it")
        if mode & 0o077:
            raise PermissionError(f"{file} is open to others (mode {mode:04o}): chmod 600 {file}")
        found = _listed(lines)
        if len(found) != 1:
            raise ValueError(f"{file}: {len(found)} keys where there should be one")
        try:
            keys = cls(found[0][1])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if not _marked(lines, _SECRET_MARK):
            raise ValueError(
                f"{file}: no line says {_SECRET_MARK!r}, as in {_SECRET}: a public key looks the same, "
                "and whoever has it would pass for this engine"
            )
        return keys

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``aiokv.key``, which only its owner can read, and ``aiokv.pub``, which is for the peers.

        Raises:
            FileExistsError: There is a key already, or half of a pair; nothing is overwritten.
            OSError: They can't be written.
        """
        where = Path(folder)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = (
            (_SECRET, 0o600, f"{_SECRET_MARK}: who has this passes for {self.public}\n{self.secret}\n"),
            (_PUBLIC, 0o644, f"{_PUBLIC_MARK}: for the lists of the peers\n{self.public}\n"),
        )
        if (where / _PUBLIC).exists() and not (where / _SECRET).exists():
            raise FileExistsError(
                errno.EEXIST,
                f"there is a public key, and its secret one, {_SECRET}, is missing: put that back, "
                "or take the public one away for a new pair",
                str(where / _PUBLIC),
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

        With certificates, fingerprints of those; also as OpenSSL writes them. Blocks: not for a running loop.

        Args:
            path: The file, or a folder with a file ``allowed``.

        Raises:
            OSError: It can't be read.
            ValueError: It lists nothing; or a line is no key, or says that a secret one follows, which
                belongs into no list. The line is named by its number.
        """
        file = _within(path, _ALLOWED)
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        if number := _marked(lines, _SECRET_MARK):
            raise ValueError(
                f"{file}, line {number}: this is a secret key, which stays with its owner; lists have "
                f"the public one, which is {_PUBLIC} beside it"
            )
        found = []
        for number, key in _listed(lines):
            try:
                found.append(checked_key(key))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
        if not found:
            raise ValueError(f"{file}: it lists no key, so that nobody could be talked to")
        return tuple(found)


def _within(path: str | os.PathLike[str], name: str) -> Path:
    if not os.fspath(path):  # which would be the working directory
        raise ValueError(f"the path of {name} is empty")
    given = Path(path)
    return given / name if given.is_dir() else given


def _marked(lines: Iterable[str], mark: str) -> int:
    """Number of the line that begins like this; 0 if none does."""
    found = (number for number, line in enumerate(lines, 1) if line.lstrip().startswith(mark))
    return next(found, 0)


def _listed(lines: Iterable[str]) -> list[tuple[int, str]]:
    """The first word of each line that has one, with the line's number."""
    words = [(number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
    return [(number, each[0]) for number, each in words if each]
