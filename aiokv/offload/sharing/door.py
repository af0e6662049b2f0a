"""Where a pool's owner is met: a unix socket with a name in the file system, for its own user only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from aiokv.errors import BusyError, DeviceError, PeerLostError, Refused

__all__ = ["bound", "checked_path", "knock", "same_user", "unbound", "watched"]

#: Connections that wait to be accepted.
_BACKLOG = 128
#: How long a folder that others have locked is waited for, in seconds.
_LOCKED_S = 2.0
#: Of a path in an address of a unix socket, with its end.
_MOST_PATH = 108
_CREDENTIALS = struct.Struct("iII")
#: getsockopt(2) of Linux 6.5; not in Python's socket yet.
_SO_PEERPIDFD = 77


def checked_path(path: str | os.PathLike[str]) -> str:
    """A path for a socket.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, or longer than the name of a unix socket can be.
    """
    found = os.fspath(path)
    if not isinstance(found, str):
        raise TypeError(f"the path of a pool is text, not {path!r}")
    if not found or "\0" in found or len(os.fsencode(found)) >= _MOST_PATH:
        raise ValueError(
            f"the path of a pool has 1 to {_MOST_PATH - 1} bytes, being a socket's, not {found!r}"
        )
    return found


# -- the owner's side


def bound(path: str) -> socket.socket:
    """Listen there, in place of an owner that is gone. Reads and changes files, so not for a loop.

    Raises:
        BusyError: An owner is there.
        DeviceError: It can't be had.
        ValueError: Something else is there, which is left alone.
    """
    if sys.platform != "linux":
        raise DeviceError("a pool for several processes needs Linux")
    try:
        with _alone(path):
            _cleared(path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.bind(path)
                # Nobody gets in before it listens, so nobody is let in by the mode that it was made with.
                Path(path).chmod(0o600)
                sock.listen(_BACKLOG)
            except BaseException:
                sock.close()
                raise
            return sock
    except OSError as error:
        raise DeviceError(f"no pool can listen at {path}: {error}") from error


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Nobody else begins, or ceases, to listen in the same folder.

    Of two that start at a time each would take the other's socket for one that was left behind.
    """
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + _LOCKED_S
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # By pools for a moment only. But whoever can read the folder can lock it, too.
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def _cleared(path: str) -> None:
    """Take away the socket of an owner that is gone."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"{path} is there, and no socket; it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:  # as many wait to be let in as can
            pass
    raise BusyError(f"a pool is at {path} already")


def unbound(path: str, sock: socket.socket) -> None:
    """Listen no more, and take the socket's file away, unless it is another's by now. Not for a loop."""
    sock.close()
    with contextlib.suppress(OSError, ValueError, BusyError), _alone(path):
        _cleared(path)


def same_user(sock: socket.socket) -> bool:
    """Whether who is at the other end, when it connected or began to listen, is of this process's user."""
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.geteuid())


def watched(sock: socket.socket) -> int:
    """A descriptor that can be read once the process that connected is gone; the caller closes it.

    A process id won't do: it is another's as soon as its process is gone.

    Raises:
        Refused: The kernel gives none.
    """
    try:
        fd: int = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        return fd
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL, errno.EOPNOTSUPP):
            raise Refused(f"the process can't be watched: {error}") from error
    process, _, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if process <= 0 or not hasattr(os, "pidfd_open"):
        raise Refused(
            "the process can't be watched: it is in a PID namespace that the pool's owner doesn't see, or "
            "there is neither SO_PEERPIDFD (Linux 6.5) nor pidfd_open (5.3); share the PID namespace"
        )
    try:
        # If it ended meanwhile, this is nobody, or somebody whose end comes later: never too early.
        return os.pidfd_open(process)
    except OSError as error:
        raise Refused(f"the process can't be watched: {error}") from error


# -- the others' side


def knock(path: str) -> socket.socket:
    """Connect to the owner.

    Raises:
        PeerLostError: Nobody is there, or too many are.
        Refused: Who is there is another user's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)  # at once, or not at all: unix sockets don't connect behind the back
        if not same_user(sock):
            raise Refused(f"the pool at {path} is another user's")
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerLostError(
            f"no pool answers at {path} (python -m aiokv pool {path} --capacity 64GiB): {error}"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock
