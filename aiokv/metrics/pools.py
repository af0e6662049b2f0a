"""What pools of host memory hold, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from aiokv.metrics.tables import PLACES, Fields, Shown, TableExporter
from aiokv.offload.sharing.owner import HostPool

__all__ = ["PoolExporter"]

_COUNTERS: Fields = MappingProxyType(
    {"evicted_blocks": ("Blocks that went for others", "", {"": "evicted_blocks"})}
)
_GAUGES: Fields = MappingProxyType(
    {
        "guests": (
            "Tiers that share it; lost: their connection ended, and their process is there",
            "state",
            {"attached": "guests", "lost": "guests_lost"},
        ),
        **PLACES,
        "waiting": ("Stores that wait for another tier's", "", {"": "waiting"}),
        "bytes": ("Host memory that it has taken", "", {"": "pool_bytes"}),
    }
)


class PoolExporter(TableExporter[HostPool]):
    """Pools of this process as a collector of a registry; a context manager that takes it out again.

    Args:
        pool: It need not be entered yet; until it is, it shows nothing.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this pool's.

    Raises:
        TypeError: An argument of the wrong kind, or labels that aren't strings.
        ValueError: The registry has such metrics already (further pools are added to the exporter that it
            has), or a label's name is one that the metrics have themselves, or none.
    """

    def __init__(
        self,
        pool: HostPool,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        shown = Shown(HostPool, "a pool", "aiokv_pool", _COUNTERS, _GAUGES, HostPool.statistics)
        super().__init__(shown, pool, registry, labels)
