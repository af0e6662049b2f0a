"""What host tiers do, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from aiokv.metrics.tables import PLACES, Fields, Shown, TableExporter
from aiokv.offload.tier import HostTier

__all__ = ["TierExporter"]

_COUNTERS: Fields = MappingProxyType(
    {
        "bytes": (
            "KV that was copied to the cache (load) or to the host (store)",
            "direction",
            {"load": "bytes_loaded", "store": "bytes_stored"},
        ),
        "device_bytes": (
            "Bytes that the cache's device has moved, of tiers and engines, by the way that was chosen",
            "path",
            {
                "plain": "bytes_by_plain",
                "batch": "bytes_by_batch",
                "staged": "bytes_by_staged",
                "kernel": "bytes_by_kernel",
            },
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
_GAUGES: Fields = MappingProxyType(
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
        **PLACES,
        "attached": ("0 while the owner of a shared pool is lost", "", {"": "attached"}),
        "pool_bytes": ("Host memory that the pool has taken", "", {"": "pool_bytes"}),
    }
)


class TierExporter(TableExporter[HostTier]):
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
        shown = Shown(HostTier, "a tier", "aiokv_tier", _COUNTERS, _GAUGES, HostTier.statistics)
        super().__init__(shown, tier, registry, labels)
