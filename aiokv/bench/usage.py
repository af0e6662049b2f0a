"""What a process uses and holds."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import aiokv

__all__ = ["holdings", "resident_bytes", "used_cpu_ns", "used_cpu_of_loop_ns"]

#: Of an engine's statistics, what is 0 while nothing goes on.
_HELD = ("offers", "fetches", "parts", "parked", "leases", "blocks_held", "quarantined", "in_flight")


def used_cpu_ns() -> int:
    """CPU time of all threads of this process so far."""
    return time.process_time_ns()


def used_cpu_of_loop_ns() -> int:
    """CPU time of the calling thread so far; the rest of the process's is that of native I/O threads."""
    return time.thread_time_ns()


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; shared memory counts as far as it was touched."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def holdings(engine: aiokv.TransferEngine) -> dict[str, int]:
    """Descriptors, tasks and shared mappings of this process, and what an engine holds."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = engine.statistics()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - a path each would be objects
        "tasks": len(asyncio.all_tasks()),
        "segments": sum("/memfd:" in line or "/dev/shm/" in line for line in maps),  # noqa: S108
        **{name: getattr(found, name) for name in _HELD},
    }
