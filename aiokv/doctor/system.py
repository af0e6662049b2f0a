"""What the kernel and its guards allow: shared memory, other processes' memory, timers, limits, ports."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aiokv.device.host import HostBuffer
from aiokv.device.timer import open_timerfd
from aiokv.doctor.findings import Finding, missing, ok, weak
from aiokv.errors import CapacityError

__all__ = ["limits", "network", "sharing", "timers"]

#: Descriptors below which a few hundred peers are too many.
_FEW_DESCRIPTORS = 4096
#: Reads the memory of the process that started it: as one engine reads another's, and not as a debugger
#: reads its own child's, which Yama allows more of.
_READER = """
import sys
import numpy as np
from aiokv.transports.vectors import VectorIO

pid, address, nbytes = map(int, sys.argv[1:])
into = np.zeros(nbytes, np.uint8)
try:
    VectorIO().read_process(pid, np.array([into.ctypes.data]), np.array([address]), np.array([nbytes]))
except OSError as error:
    sys.exit(f"{error.strerror}")
print(into.tobytes().hex())
"""
_CAP_SYS_PTRACE = 19
#: getsockopt(2): a pidfd of who is at the other end.
_SO_PEERPIDFD = 77


def sharing() -> Iterator[Finding]:
    """Shared memory, and reading another process's."""
    yield _memfd()
    yield _cma()
    yield _pidfd()


def _memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        return missing("transports", "memfd", "not on this system: no shm; tcp is used on one host, too")
    try:
        buffer = HostBuffer.allocate(4096)
    except CapacityError as error:
        return missing("transports", "memfd", f"no shm: {error}", _unconfined())
    buffer.close()
    return ok("transports", "memfd", "made, filled and sealed")


def _cma() -> Finding:
    library = ctypes.CDLL(None) if sys.platform != "win32" else None
    if not hasattr(library, "process_vm_readv") or not hasattr(os, "pidfd_open"):
        return missing("transports", "process_vm_readv", "not on this system: no cma, tcp takes its place")
    nonce = np.frombuffer(os.urandom(32), np.uint8)
    arguments = [str(os.getpid()), str(nonce.ctypes.data), str(nonce.size)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _READER, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return missing("transports", "process_vm_readv", f"could not be tried: {error}")
    if done.returncode == 0 and done.stdout.strip() == nonce.tobytes().hex():
        return ok("transports", "process_vm_readv", "another process reads this one's memory")
    lines = done.stderr.strip().splitlines()
    guard, mend = guards()
    found = f"no cma, refused: {lines[-1] if lines else 'it read something else'}{guard}"
    return missing("transports", "process_vm_readv", found, mend)


def _pidfd() -> Finding:
    """What the owner of a pool sees the end of others by."""
    if sys.platform != "linux":
        return missing("transports", "pidfd", "not on this system: no pool for several processes")
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        try:
            os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
            return ok("transports", "pidfd", "of who connects (SO_PEERPIDFD)")
        except OSError:
            pass
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        found = f"none ({error}): no pool for several processes"
        return missing("transports", "pidfd", found, "Linux 5.3 or newer; in a container, allow pidfd_open")
    found = (
        "by process id, SO_PEERPIDFD is Linux 6.5's: a pool and those that share it need one PID namespace"
    )
    return ok("transports", "pidfd", found)


def guards(proc: Path = Path("/proc")) -> tuple[str, str]:
    """What on this machine stands between a process and another's memory.

    Args:
        proc: Where the kernel tells.

    Returns:
        What was found, in words, to be put behind others; and what mends it.
    """
    lines = [line.partition(":") for line in _text(proc / "self/status").splitlines()]
    status = {key: value.strip() for key, _, value in lines}
    scope = _text(proc / "sys/kernel/yama/ptrace_scope").strip()
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1
    found, mends = [], []
    if scope in ("1", "2") and not capable:
        found.append(f"Yama's ptrace_scope is {scope}")
        mends.append("sysctl -w kernel.yama.ptrace_scope=0")
    elif scope == "3":
        found.append("Yama's ptrace_scope is 3, which stays until the next boot")
        mends.append("boot with kernel.yama.ptrace_scope=0")
    if status.get("Seccomp") == "2":
        found.append("a seccomp filter is on" + (" (a container's)" if _contained(proc) else ""))
        mends.append(_unconfined())
    if not found and not capable:
        mends.append("run both processes as one user, neither of them setuid")
    return "".join(f"; {each}" for each in found), "; ".join(mends)


def _contained(proc: Path) -> bool:
    marks = (proc.parent / ".dockerenv", proc.parent / "run/.containerenv")
    return any(mark.exists() for mark in marks) or "kubepods" in _text(proc / "1/cgroup")


def _unconfined() -> str:
    return "docker run --cap-add SYS_PTRACE (or --security-opt seccomp=unconfined)"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def timers() -> Iterator[Finding]:
    """The timer that waits for microseconds."""
    try:
        fd, _ = open_timerfd()
    except (OSError, AttributeError) as error:
        found = f"none ({error}): waits for a GPU are a millisecond long, everything else is as it is"
        yield weak("transports", "timerfd", found)
        return
    os.close(fd)
    how = "Python's own" if hasattr(os, "timerfd_create") else "by ctypes; Python 3.13 has its own"
    yield ok("transports", "timerfd", how)


def limits() -> Iterator[Finding]:
    """How many descriptors, and how much locked memory, a process may have."""
    try:
        import resource
    except ImportError:
        yield weak("limits", "descriptors", "not told on this system")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_number(soft)} (up to {_number(hard)})"
    if 0 <= soft < _FEW_DESCRIPTORS:
        mend = "ulimit -n 65536; in a container: docker run --ulimit nofile=65536"
        yield weak("limits", "descriptors", f"{found}: a peer takes several", mend)
    else:
        yield ok("limits", "descriptors", found)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{_number(soft)} bytes (up to {_number(hard)})"
    if soft >= 0:
        mend = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1"
        yield weak("limits", "locked memory", f"{found}: matters only beside RDMA libraries", mend)
    else:
        yield ok("limits", "locked memory", found)


def _number(limit: int) -> str:
    return f"{limit:,}" if limit >= 0 else "unlimited"


def network() -> Iterator[Finding]:
    """Whether ports can be had, for peers on this host and on others."""
    yield _port("loopback", socket.AF_INET, "127.0.0.1", required=True)
    if socket.has_ipv6:
        yield _port("loopback, IPv6", socket.AF_INET6, "::1")
    host = _outward()
    if not host:
        found = "no route leaves this host: peers on other hosts can't be reached"
        yield missing("network", "beyond loopback", found, "in a container: docker run --network host")
    else:
        yield _port("beyond loopback", socket.AF_INET, host)


def _port(name: str, family: int, host: str, *, required: bool = False) -> Finding:
    """Bind a free port and connect to it."""
    try:
        with socket.socket(family) as listening, socket.socket(family) as calling:
            listening.bind((host, 0))
            listening.listen()
            calling.settimeout(5)
            calling.connect(listening.getsockname())
            return ok("network", name, f"{host}, any free port", required=required)
    except OSError as error:
        return missing("network", name, f"{host}: {error}", required=required)


def _outward() -> str:
    """The address by which this host would reach others; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("192.0.2.1", 9))  # an address for documentation: nobody's
            host: str = sock.getsockname()[0]
            return host
    except OSError:
        return ""
