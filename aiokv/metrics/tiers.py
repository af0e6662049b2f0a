"""What host tiers do, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aiokv.errors import ClosedError
from aiokv.metrics.labels import checked_labels
from aiokv.offload.statistics import TierStatistics
from aiokv.offload.tier import HostTier

__all__ = ["TierExporter"]

#: Labels that some of the metrics have.
_OWN = frozenset({"class", "direction", "state"})

#: By the metric's name what it is, its label if it has one, and the statistics' field for each value of that.
_Fields = Mapping[str, tuple[str, str, Mapping[str, str]]]
_COUNTERS: _Fields = MappingProxyType(
    {
        "bytes": (
            "KV that was copied to the cache (load) or to the host (store)",
            "direction",
            {"load": "bytes_loaded", "store": "bytes_stored"},
        ),
        "copy_seconds": (
            "Time of those copies, in sum over their parts",
            "direction",
            {"load": "load_seconds", "store": "store_seconds"},
        ),
        "lookups": ("Lookups", "", {"": "lookups"}),
        "hit_blocks": ("Blocks that lookups found", "", {"": "hit_blocks"}),
        "miss_blocks": ("Blocks that lookups did not find", "", {"": "miss_blocks"}),
        "joined_blocks": ("Blocks for which a copy was on its way already", "", {"": "joined_blocks"}),
        "evicted_blocks": ("Blocks that went for others", "", {"": "evicted_blocks"}),
        "refused_blocks": ("Blocks that were offered and not kept", "", {"": "refused_blocks"}),
        "dropped_blocks": ("Blocks whose copy failed, or that had changed", "", {"": "dropped_blocks"}),
        "failed_copies": ("Parts of copies that failed", "", {"": "failed_copies"}),
        "policy_faults": ("Times that the policy failed and was replaced", "", {"": "policy_faults"}),
        "checksums_checked": ("Loaded blocks whose checksum was looked at", "", {"": "checksums_checked"}),
        "checksum_failures": ("Those that had changed", "", {"": "checksum_failures"}),
    }
)
_GAUGES: _Fields = MappingProxyType(
    {
        "canary": ("1 while no block was found changed", "", {"": "canary"}),
        "copy_rate_bytes": (
            "Bytes a second of late",
            "direction",
            {"load": "load_rate", "store": "store_rate"},
        ),
        "queue": (
            "Parts of copies to be submitted",
            "class",
            {"load": "loads_queued", "store": "stores_queued"},
        ),
        "copies": ("Loads and stores going on", "", {"": "copies"}),
        "leased_blocks": ("Blocks of the cache that copies hold", "", {"": "blocks_leased"}),
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
        ),
        "pool_bytes": ("Host memory that the pool has taken", "", {"": "pool_bytes"}),
    }
)


class TierExporter(Collector):
    """Host tiers of this process as a collector of a registry; a context manager that takes it out again.

    Args:
        tier: It need not be entered yet; until it is, it shows nothing.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this tier's, the rank say.

    Raises:
        TypeError: An argument of the wrong kind, or labels that aren't strings.
        ValueError: The registry has such metrics already (further tiers are added to the exporter that it
            has), or a label's name is one that the metrics have themselves, or none.
    """

    def __init__(
        self,
        tier: HostTier,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if registry is not None and not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry is a CollectorRegistry of prometheus_client's, not {registry!r}")
        self._tiers: dict[tuple[str, ...], HostTier] = {}
        self._closed = False
        self._names = tuple(checked_labels(labels))
        if taken := sorted(_OWN.intersection(self._names)):
            raise ValueError(f"labels {taken} are the metrics' own; take other names")
        self.add(tier, labels)
        self._registry = REGISTRY if registry is None else registry
        try:
            self._registry.register(self)
        except ValueError as error:
            raise ValueError(
                "this registry shows metrics of host tiers already: add this tier to the exporter that it "
                "has, exporter.add(tier, labels), or pass another registry"
            ) from error

    def add(self, tier: HostTier, labels: Mapping[str, str] | None = None) -> None:
        """Show another tier, too.

        Args:
            tier: The tier.
            labels: The same names as the first one has, and other values.

        Raises:
            ClosedError: The exporter is closed.
            TypeError: It is no tier, or labels aren't strings.
            ValueError: Other names, or the values of one that is shown already.
        """
        if self._closed:
            raise ClosedError("the exporter is closed")
        if not isinstance(tier, HostTier):
            raise TypeError(f"tier is a HostTier, not {tier!r}")
        given = checked_labels(labels)
        if set(given) != set(self._names):
            raise ValueError(f"all tiers have the labels {list(self._names)}, not {list(given)}")
        values = tuple(given[name] for name in self._names)
        if values in self._tiers or any(tier is shown for shown in self._tiers.values()):
            raise ValueError(f"{tier!r}, or one with the labels {given}, is shown already")
        self._tiers[values] = tier

    def close(self) -> None:
        """Take it out of the registry. May be called twice."""
        if not self._closed:
            self._closed = True
            self._tiers = {}
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
        return self._shown([])

    def collect(self) -> Iterable[Metric]:
        """All metrics, as they stand; called by the registry."""
        found = []
        for labels, tier in list(self._tiers.items()):
            try:
                found.append((labels, tier.statistics()))
            except ClosedError:  # not entered yet
                continue
        return self._shown(found)

    def _shown(self, found: Sequence[tuple[tuple[str, ...], TierStatistics]]) -> list[Metric]:
        made: list[Metric] = []
        kinds = ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES))
        for kind, table in kinds:
            for name, (text, own, fields) in table.items():
                family = kind(f"aiokv_tier_{name}", text, labels=[*self._names, *([own] if own else [])])
                for labels, statistics in found:
                    for value, field in fields.items():
                        more = (value,) if own else ()
                        family.add_metric([*labels, *more], float(getattr(statistics, field)))
                made.append(family)
        return made
