"""What the page shows, as JSON, and what ``/metrics`` adds to the counts: how things stand now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aiokv.router.admission import Admission
from aiokv.router.discovery import Discovery
from aiokv.router.figures import Figures
from aiokv.router.messages import ROLES
from aiokv.router.registry import Member, Registry

__all__ = ["Feed"]


class Feed:
    """A look at a router.

    Args:
        registry: Its instances.
        discovery: How they are heard.
        admission: What is under way.
        figures: What it did.
        clock: Monotonic (ns), the registry's.
    """

    def __init__(
        self,
        registry: Registry,
        discovery: Discovery,
        admission: Admission,
        figures: Figures,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._registry, self._discovery, self._admission = registry, discovery, admission
        self._clock = clock
        self._since = clock()
        self.figures = figures
        self._gauges = {
            "running": figures.gauge("requests_running", "Requests that instances work on"),
            "waiting": figures.gauge("requests_waiting", "Requests that wait for a place"),
            "lag": figures.gauge("loop_lag_seconds", "How late the sweep came lately, at worst"),
            "garbage": figures.gauge("garbage_frames", "Control frames that were no messages"),
        }
        self._instances = figures.gauge("instances", "Instances by role and state", ["role", "state"])

    def now(self) -> dict[str, Any]:
        """All of it."""
        now = self._clock()
        members = sorted(self._registry.members.values(), key=lambda each: (each.role, each.http))
        return {
            "router": {
                "uptime": (now - self._since) / 1e9,
                "control": self._discovery.address,
                "running": self._admission.inside,
                "waiting": self._admission.waiting,
                "loop_lag": self._discovery.lag,
                "garbage": self._discovery.garbage,
            },
            "instances": [self._instance(each, now) for each in members],
            "latencies": self.figures.latencies(),
            "ended": dict(self.figures.ended),
            "failures": dict(self.figures.failures),
        }

    def _instance(self, member: Member, now: int) -> dict[str, Any]:
        load = member.report.load
        return {
            "id": member.incarnation.hex()[:8],
            "role": member.role,
            "http": member.http,
            "models": list(member.report.models),
            "state": _state(member),
            "why": member.why,
            "in_flight": member.in_flight,
            "served": member.served,
            "running": load.running,
            "waiting": load.waiting,
            "blocks_free": load.blocks_free,
            "blocks": load.blocks,
            "rate": member.rate,
            "loop_lag": load.loop_lag,
            "wakeup_lag": load.wakeup_lag,
            "heard": max(0, now - member.heard_at) / 1e9,
            "expires": (member.expires_at - now) / 1e9,
            "since": (now - member.joined_at) / 1e9,
        }

    def measure(self) -> None:
        """Set the gauges for a scrape."""
        self._gauges["running"].set(self._admission.inside)
        self._gauges["waiting"].set(self._admission.waiting)
        self._gauges["lag"].set(self._discovery.lag)
        self._gauges["garbage"].set(self._discovery.garbage)
        counts = {(role, state): 0 for role in ROLES for state in ("up", "draining", "suspect", "joining")}
        for member in self._registry.members.values():
            counts[member.role, _state(member)] += 1
        for (role, state), count in counts.items():
            self._instances.labels(role, state).set(count)


def _state(member: Member) -> str:
    if not member.verified:
        return "joining"
    if member.report.draining:
        return "draining"
    return "suspect" if member.suspect else "up"
