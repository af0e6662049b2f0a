"""What all exporters have in common: whom they show, by which labels, and in which registry."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from aiokv.errors import ClosedError
from aiokv.metrics.labels import checked_labels

__all__ = ["StatisticsExporter"]

_T = TypeVar("_T")
_S = TypeVar("_S")


class StatisticsExporter(Collector, abc.ABC, Generic[_T, _S]):
    """Things of one kind as a collector of a registry; a context manager that takes it out again.

    Args:
        kind: Their class.
        one: One of them, in messages, with an article where it needs one.
        own: Labels that some of the metrics have.
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
        kind: type[_T],
        one: str,
        own: Collection[str],
        thing: _T,
        registry: CollectorRegistry | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        if registry is not None and not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry is a CollectorRegistry of prometheus_client's, not {registry!r}")
        self._kind, self._one = kind, one
        self._word = word = one.rsplit(maxsplit=1)[-1]
        self._things: dict[tuple[str, ...], _T] = {}
        self._closed = False
        self._names = tuple(checked_labels(labels))
        if taken := sorted(set(own).intersection(self._names)):
            raise ValueError(f"labels {taken} are the metrics' own; take other names")
        self.add(thing, labels)
        self._registry = REGISTRY if registry is None else registry
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ValueError(
                f"this registry shows metrics of {word}s already: keep the exporter that it has and add "
                f"this {word} to it, exporter.add({word}, labels), or pass another registry"
            ) from error

    def add(self, thing: _T, /, labels: Mapping[str, str] | None = None) -> None:
        """Show another one, too.

        Args:
            thing: Of the same kind.
            labels: The same names as the first one has, and other values.

        Raises:
            ClosedError: The exporter is closed.
            TypeError: It is of another kind, or labels aren't strings.
            ValueError: Other names, the values of one that is shown already, or that one itself.
        """
        if self._closed:
            raise ClosedError("the exporter is closed")
        if not isinstance(thing, self._kind):
            raise TypeError(f"{self._one} is a {self._kind.__name__}, not {thing!r}")
        given, word = checked_labels(labels), self._word
        if set(given) != set(self._names):
            raise ValueError(f"all {word}s have the labels {list(self._names)}, not {list(given)}")
        if any(thing is shown for shown in self._things.values()):
            raise ValueError(f"{thing!r} is shown already; twice, it would count twice in every sum")
        values = tuple(given[name] for name in self._names)
        if values in self._things:
            raise ValueError(f"another {word} has the labels {given}; tell them apart")
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
        return self._metrics([])

    def collect(self) -> Iterable[Metric]:
        """All metrics, as they stand; called by the registry."""
        found = []
        for labels, thing in list(self._things.items()):
            try:
                found.append((labels, self._statistics(thing)))
            except ClosedError:  # not entered yet
                continue
        return self._metrics(found)

    @abc.abstractmethod
    def _statistics(self, thing: _T) -> _S:
        """A snapshot, from any thread; ClosedError where there is nothing to show."""

    @abc.abstractmethod
    def _metrics(self, found: Sequence[tuple[tuple[str, ...], _S]]) -> Iterable[Metric]:
        """All metrics, with what was found of each thing, by the values of its labels."""
