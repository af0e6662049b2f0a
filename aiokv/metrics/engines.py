"""What engines do, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from aiokv.engine.engine import TransferEngine
from aiokv.engine.histogram import BOUNDS, Times
from aiokv.engine.statistics import Statistics
from aiokv.metrics.exporting import StatisticsExporter

__all__ = ["Exporter"]

#: Labels that some of the metrics have.
_OWN = frozenset({"direction", "le", "outcome", "role", "state", "transport"})


class Exporter(StatisticsExporter[TransferEngine, Statistics]):
    """Engines of this process as a collector of a registry; a context manager that takes it out again.

    Args:
        engine: It need not be entered yet; until it is, it shows nothing.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this engine's, the rank say.

    Once it is closed it shows nothing. An engine that is closed is shown with its last counts until then.

    Raises:
        TypeError: An argument of the wrong kind, or labels that aren't strings.
        ValueError: The registry has such metrics already (further engines are added to the
            exporter that it has), or a label's name is one that the metrics have themselves, or none.
    """

    def __init__(
        self,
        engine: TransferEngine,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(TransferEngine, "engine", _OWN, engine, registry, labels)

    def add(self, engine: TransferEngine, labels: Mapping[str, str] | None = None) -> None:
        """Show another engine, too.

        Args:
            engine: The engine.
            labels: The same names as the first engine has, and other values.

        Raises:
            ClosedError: The exporter is closed.
            TypeError: It is no engine, or labels aren't strings.
            ValueError: Other names, the values of an engine that is shown already, or that engine itself.
        """
        super().add(engine, labels)

    def _statistics(self, thing: TransferEngine) -> Statistics:
        return thing.statistics()

    def _metrics(self, found: Sequence[tuple[tuple[str, ...], Statistics]]) -> Iterable[Metric]:
        families = _Families(self._names)
        for labels, statistics in found:
            _fill(families, statistics, labels)
        return families.made


class _Families:
    """The metrics of one scrape, and one line for each that was added to them.

    Args:
        names: Of the labels that all have.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._counters = _counters(names)
        self._gauges = _gauges(names)
        self._histograms = _histograms(names)

    @property
    def made(self) -> list[Metric]:
        """All of them."""
        return [*self._counters.values(), *self._gauges.values(), *self._histograms.values()]

    def count(self, name: str, labels: Sequence[str], value: float) -> None:
        """Something that only grows."""
        self._counters[name].add_metric(labels, value)

    def show(self, name: str, labels: Sequence[str], value: float) -> None:
        """Something that is now."""
        self._gauges[name].add_metric(labels, value)

    def time(self, name: str, labels: Sequence[str], times: Times) -> None:
        """How long something took, each time."""
        self._histograms[name].add_metric(labels, list(_cumulative(times)), times.total)


def _cumulative(times: Times) -> Iterator[tuple[str, float]]:
    """For each bucket its upper bound, and how many there are up to it."""
    total = 0
    for bound, count in zip((*BOUNDS, None), times.counts, strict=True):
        total += count
        yield "+Inf" if bound is None else f"{bound:g}", total


def _counters(names: Sequence[str]) -> dict[str, CounterMetricFamily]:
    texts = {
        "bytes": ("KV that came into the cache (received), or left it (sent)", "direction", "transport"),
        "parts_ended": ("Parts (a transfer has one for each other engine) by how they ended", "outcome"),
        "control_frames": ("Control frames; stray ones belong to no session", "direction"),
        "sessions_lost": ("Sessions that were lost with live parts",),
        "turns": ("Turns of the event loop in which the engine worked",),
        "wakeups": ("Times that the completion timer woke the loop",),
        "wakeup_lag_seconds": ("How much later than asked those came, in sum",),
        "completions": ("Device events that were waited for, by how they ended", "outcome"),
        "completion_lag_seconds": ("Time in which an event may have waited to be looked at, in sum",),
        "event_queries": ("Queries of device events",),
    }
    return {
        name: CounterMetricFamily(f"aiokv_{name}", text, labels=[*names, *more])
        for name, (text, *more) in texts.items()
    }


def _gauges(names: Sequence[str]) -> dict[str, GaugeMetricFamily]:
    texts = {
        "transfers": ("Transfers going on", "role"),
        "parts": ("Parts with a session, going on",),
        "parts_queued": ("Parts with bytes that may move and wait for their turn",),
        "requests_parked": ("Grants and offers of peers that wait for their other half",),
        "leased_blocks": ("Blocks held by transfers",),
        "leases": ("Transfers that hold blocks",),
        "quarantined_blocks": ("Blocks that stay held, since something in flight may still touch them",),
        "copies_in_flight": ("Submitted copies that have not completed",),
        "in_flight_bytes": ("Bytes of those, as they count in the window",),
        "window_bytes": ("How many that may be at most; the rest is credit",),
        "sessions": ("Sessions with peers",),
        "wakeup_lag_max_seconds": ("How much later than asked the completion timer came, at worst",),
        "loop_lag_max_seconds": ("How late the engine's timer came, at worst",),
    }
    return {
        name: GaugeMetricFamily(f"aiokv_{name}", text, labels=[*names, *more])
        for name, (text, *more) in texts.items()
    }


def _histograms(names: Sequence[str]) -> dict[str, HistogramMetricFamily]:
    texts = {
        "part_state_seconds": ("Time of parts in each state of their life", "role", "state"),
        "loop_lag_seconds": ("How late the engine's timer came: how long others held the loop",),
    }
    return {
        name: HistogramMetricFamily(f"aiokv_{name}", text, labels=[*names, *more])
        for name, (text, *more) in texts.items()
    }


def _fill(to: _Families, found: Statistics, labels: tuple[str, ...]) -> None:
    """One engine's share."""
    for transport, nbytes in found.received_by_transport.items():
        to.count("bytes", (*labels, "received", transport), nbytes)
    for transport, nbytes in found.sent_by_transport.items():
        to.count("bytes", (*labels, "sent", transport), nbytes)
    for outcome, count in found.parts_ended.items():
        to.count("parts_ended", (*labels, outcome), count)
    to.count("control_frames", (*labels, "sent"), found.frames_sent)
    to.count("control_frames", (*labels, "received"), found.frames_received)
    to.count("control_frames", (*labels, "stray"), found.frames_stray)
    to.count("sessions_lost", labels, found.sessions_lost)
    to.count("turns", labels, found.turns)
    completion = found.completion
    to.count("wakeups", labels, completion.wakeups)
    to.count("wakeup_lag_seconds", labels, completion.wakeup_lag_ns / 1e9)
    to.count("completions", (*labels, "done"), completion.delivered - completion.failed)
    to.count("completions", (*labels, "failed"), completion.failed)
    to.count("completion_lag_seconds", labels, completion.lag_ns / 1e9)
    to.count("event_queries", labels, completion.queries)
    to.show("transfers", (*labels, "producer"), found.offers)
    to.show("transfers", (*labels, "consumer"), found.fetches)
    to.show("parts", labels, found.parts)
    to.show("parts_queued", labels, found.parts_queued)
    to.show("requests_parked", labels, found.parked)
    to.show("leased_blocks", labels, found.blocks_held)
    to.show("leases", labels, found.leases)
    to.show("quarantined_blocks", labels, found.blocks_quarantined)
    to.show("copies_in_flight", labels, found.in_flight)
    to.show("in_flight_bytes", labels, found.bytes_in_flight)
    to.show("window_bytes", labels, found.window_bytes)
    to.show("sessions", labels, found.sessions)
    to.show("wakeup_lag_max_seconds", labels, completion.wakeup_lag_max_ns / 1e9)
    to.show("loop_lag_max_seconds", labels, found.loop_lag_max)
    for (role, state), times in found.state_times.items():
        to.time("part_state_seconds", (*labels, role, state), times)
    to.time("loop_lag_seconds", labels, found.loop_lags)
