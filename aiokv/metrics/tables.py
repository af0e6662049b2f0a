"""Frozen statistics as metrics for Prometheus, by tables that say which field is shown as what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aiokv.metrics.exporting import StatisticsExporter

__all__ = ["PLACES", "Fields", "Shown", "TableExporter"]

#: By the metric's name what it is, its label if it has one, and the statistics' field for each value of that.
Fields = Mapping[str, tuple[str, str, Mapping[str, str]]]

#: Of what has places for blocks: a tier, and a pool that several share.
PLACES: Fields = MappingProxyType(
    {
        "places": (
            "Blocks that the pool has room for, by what they are",
            "state",
            {
                "all": "places",
                "wanted": "places_wanted",
                "used": "places_used",
                "pinned": "places_pinned",
                "pending": "places_pending",
            },
        )
    }
)

_T = TypeVar("_T")


class Shown(Generic[_T]):
    """What is shown of one kind of things.

    Attributes:
        kind: Their class.
        one: One of them, in messages, with its article.
        prefix: Of the metrics' names.
        counters: What only grows.
        gauges: What goes up and down.
        statistics: A snapshot of one, from any thread; ClosedError where there is nothing to show.
    """

    def __init__(
        self,
        kind: type[_T],
        one: str,
        prefix: str,
        counters: Fields,
        gauges: Fields,
        statistics: Callable[[_T], object],
    ) -> None:
        self.kind = kind
        self.one = one
        self.prefix = prefix
        self.tables = ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges))
        self.statistics = statistics
        #: Labels that some of the metrics have.
        self.own = frozenset(own for _, table in self.tables for _, own, _ in table.values() if own)


class TableExporter(StatisticsExporter[_T, object]):
    """Things of one kind, whose statistics' fields are shown by tables; see ``StatisticsExporter``.

    Args:
        shown: What is shown of them.
        thing: The first of them.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this one's.
    """

    def __init__(
        self,
        shown: Shown[_T],
        thing: _T,
        registry: CollectorRegistry | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        self._shown = shown
        super().__init__(shown.kind, shown.one, shown.own, thing, registry, labels)

    def _statistics(self, thing: _T) -> object:
        return self._shown.statistics(thing)

    def _metrics(self, found: Sequence[tuple[tuple[str, ...], object]]) -> list[Metric]:
        made: list[Metric] = []
        for kind, table in self._shown.tables:
            for name, (text, own, fields) in table.items():
                label = [own] if own else []
                family = kind(f"{self._shown.prefix}_{name}", text, labels=[*self._names, *label])
                for labels, statistics in found:
                    for value, field in fields.items():
                        more = (value,) if own else ()
                        family.add_metric([*labels, *more], float(getattr(statistics, field)))
                made.append(family)
        return made
