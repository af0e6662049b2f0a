"""What the doctor says of one thing."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Report", "missing", "ok", "weak"]

#: There; there, but less than could be; not there.
State = Literal["ok", "weak", "missing"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    #: What it belongs to: "needed", "transports", "gpu", "limits", "network", "extras".
    topic: str
    name: str
    state: State
    #: What was found.
    found: str
    #: The command, or the change, that mends it; empty where there is nothing to mend.
    mend: str = ""
    #: Nothing works without it.
    required: bool = False


class Report(msgspec.Struct, frozen=True):
    """All that was found on a machine."""

    aiokv: str
    system: str
    findings: list[Finding]

    @property
    def broken(self) -> list[Finding]:
        """What is required and isn't there."""
        return [each for each in self.findings if each.required and each.state == "missing"]


def ok(topic: str, name: str, found: str, *, required: bool = False) -> Finding:
    """It is there."""
    return Finding(topic, name, "ok", found, required=required)


def weak(topic: str, name: str, found: str, mend: str = "") -> Finding:
    """It is there, and could be better."""
    return Finding(topic, name, "weak", found, mend)


def missing(topic: str, name: str, found: str, mend: str = "", *, required: bool = False) -> Finding:
    """It is not there."""
    return Finding(topic, name, "missing", found, mend, required)
