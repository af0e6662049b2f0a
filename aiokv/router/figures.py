"""What a router did, for ``/metrics`` and for the page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import prometheus_client as prometheus

__all__ = ["Figures"]

#: Bounds of times, in seconds.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: Requests that the page's latencies are of.
_RECENT = 512


class Figures:
    """Counts of one router, in a registry of its own.

    Attributes:
        registry: What ``/metrics`` shows.
        ended: Requests by how they ended.
        failures: Attempts that failed, by kind.
    """

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.ended: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._first: deque[float] = deque(maxlen=_RECENT)
        self._whole: deque[float] = deque(maxlen=_RECENT)
        self._requests = prometheus.Counter(
            "aiokv_router_requests", "Requests by status", ["status"], registry=self.registry
        )
        self._failed = prometheus.Counter(
            "aiokv_router_failures", "Attempts that failed, by kind", ["kind"], registry=self.registry
        )
        self._first_token = prometheus.Histogram(
            "aiokv_router_first_token_seconds",
            "From the request to the first piece of its stream",
            buckets=_BOUNDS,
            registry=self.registry,
        )
        self._duration = prometheus.Histogram(
            "aiokv_router_request_seconds",
            "From the request to the end of its answer",
            buckets=_BOUNDS,
            registry=self.registry,
        )

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> prometheus.Gauge:
        """Something that is now; set when somebody scrapes."""
        return prometheus.Gauge(f"aiokv_router_{name}", text, labels, registry=self.registry)

    def first_token(self, seconds: float) -> None:
        """A stream began."""
        self._first.append(seconds)
        self._first_token.observe(seconds)

    def request(self, status: int, how: str, seconds: float) -> None:
        """A request ended.

        Args:
            status: What the client was told; 499: it went away.
            how: ``answered``, or the code of its error.
            seconds: How long it took.
        """
        self.ended[how] += 1
        self._requests.labels(str(status)).inc()
        if how == "answered":
            self._whole.append(seconds)
            self._duration.observe(seconds)

    def failure(self, kind: str) -> None:
        """An attempt failed."""
        self.failures[kind] += 1
        self._failed.labels(kind).inc()

    def latencies(self) -> dict[str, dict[str, float]]:
        """Quantiles of the last requests, in seconds."""
        return {"first_token": _quantiles(self._first), "request": _quantiles(self._whole)}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    kept = sorted(values)
    return {f"p{share}": kept[(len(kept) - 1) * share // 100] for share in (50, 90, 99)} if kept else {}
