"""Looks at everything, in the order in which it is shown."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import aiokv
from aiokv.doctor.findings import Finding, Report
from aiokv.doctor.software import extras, gpu, needed
from aiokv.doctor.system import limits, network, sharing, timers
from aiokv.doctor.trial import trials

__all__ = ["examine"]

_LOOKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    needed,
    trials,
    sharing,
    timers,
    gpu,
    network,
    limits,
    extras,
)


def examine() -> Report:
    """Look at everything. Blocks for some seconds, starts a process, and runs an event loop of its own."""
    findings = [finding for look in _LOOKS for finding in look()]
    return Report(aiokv.__version__, f"{platform.system()} {platform.release()}", findings)
