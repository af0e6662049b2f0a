"""Frozen statistics as metrics for Prometheus, by tables that say which field is shown as what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aiokv.errors import ClosedError
from aiokv.metrics.labels import checked_labels

__all__ = ["Fields", "Shown", "TableExporter"]

#: By the metric's name what it is, its label if it has one, and the statistics' field for each value of that.
Fields = Mapping[str, tuple[str, str, Mapping[str, str]]]

_T = TypeVar("_T")


class Shown(Generic[_T]):
    """What is shown of one kind of things.

    Attributes:
        kind: Their class.
        word: One of them, in messages.
        prefix: Of the metrics' names.
        counters: What only grows.
        gauges: What goes up and down.
        statistics: A snapshot of one, from any thread; ClosedError where there is nothing to show.
    """

    def __init__(
        self,
        kind: type[_T],
        word: str,
        prefix: str,
        counters: Fields,
        gauges: Fields,
        statistics: Callable[[_T], object],
    ) -> None:
        self.kind = kind
        self.word = word
        self.prefix = prefix
        self.tables = ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges))
        self.statistics = statistics
        #: Labels that some of the metrics have.
        self.own = frozenset(own for _, table in self.tables for _, own, _ in table.values() if own)


class TableExporter(Collector, Generic[_T]):
    """Things of one kind as a collector of a registry; a context manager that takes it out again.

    Args:
        shown: What is shown of them.
        thing: The first of them.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this one's.

    Raises:
        TypeError: An argument of the wrong kind, or labels that aren't strings.
        ValueError: The registry has such metrics already (further ones are added to the exporter that it
            has), or a label's name is one that the metrics have themselves, or none.
    """

    def __init__(
        self,
        shown: Shown[_T],
        thing: _T,
        registry: CollectorRegistry | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        if registry is not None and not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry is a CollectorRegistry of prometheus_client's, not {registry!r}")
        self._shown = shown
        self._things: dict[tuple[str, ...], _T] = {}
        self._closed = False
        self._names = tuple(checked_labels(labels))
        if taken := sorted(shown.own.intersection(self._names)):
            raise ValueError(f"labels {taken} are the metrics' own; take other names")
        self.add(thing, labels)
        self._registry = REGISTRY if registry is None else registry
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ValueError(
                f"this registry shows metrics of {shown.word}s already: add this {shown.word} to the "
                f"exporter that it has, exporter.add({shown.word}, labels), or pass another registry"
            ) from error

    def add(self, thing: _T, labels: Mapping[str, str] | None = None) -> None:
        """Show another one, too.

        Args:
            thing: Of the same kind.
            labels: The same names as the first one has, and other values.

        Raises:
            ClosedError: The exporter is closed.
            TypeError: It is of another kind, or labels aren't strings.
            ValueError: Other names, or the values of one that is shown already.
        """
        if self._closed:
            raise ClosedError("the exporter is closed")
        kind, word = self._shown.kind, self._shown.word
        if not isinstance(thing, kind):
            raise TypeError(f"a {word} is a {kind.__name__}, not {thing!r}")
        given = checked_labels(labels)
        if set(given) != set(self._names):
            raise ValueError(f"all {word}s have the labels {list(self._names)}, not {list(given)}")
        values = tuple(given[name] for name in self._names)
        if values in self._things or any(thing is there for there in self._things.values()):
            raise ValueError(f"{thing!r}, or one with the labels {given}, is shown already")
        self._things[values] = thing

    def close(self) -> None:
        """Take it out of the registry. May be called twice."""
        if not self._closed:
            self._closed = True
            self._things = {}
            self._registry.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def describe(self) -> Iterable[Metric]:
        """The metrics without values: by their names the registry notices doubles."""
        return self._made([])

    def collect(self) -> Iterable[Metric]:
        """All metrics, as they stand; called by the registry."""
        found = []
        for labels, thing in list(self._things.items()):
            try:
                found.append((labels, self._shown.statistics(thing)))
            except ClosedError:
                continue
        return self._made(found)

    def _made(self, found: Sequence[tuple[tuple[str, ...], object]]) -> list[Metric]:
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
