"""What a worker's transfers and its host tier did, for vLLM's log and for its Prometheus endpoint.

Only what vLLM can't know is told: how long loads took and what they moved, and what came to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from aiokv.integrations.vllm.reports import Outcome
    from aiokv.offload.statistics import TierStatistics

__all__ = ["Endpoint", "Figures"]

#: What is counted, and in what words.
_COUNTS = MappingProxyType(
    {
        "loads_failed": "Loads from a prefill side that failed or were given up.",
        "sends_failed": "Requests whose KV nobody took: it was late, was given up, or its reader was lost.",
        "tier_loads_failed": "Loads from the host tier that did not bring all; the rest is computed.",
        "tier_stored_bytes": "Bytes that were copied to the host tier.",
        "tier_evicted_blocks": "Blocks of the host tier that went for others.",
        "tier_refused_blocks": "Blocks for which the host tier had no room, as all else was in use.",
    }
)
#: What is measured of each load, and where it comes from.
_LOADS = MappingProxyType({"load": "a prefill side", "tier_load": "the host tier"})


@dataclass
class Figures(KVConnectorStats):  # type: ignore[misc]
    """Figures of one interval; vLLM carries ``data`` between processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        for name in _LOADS:
            self.data[f"{name}_seconds"], self.data[f"{name}_bytes"] = [], []

    def add(self, outcome: Outcome) -> None:
        """Count what came to an end in one step."""
        for name, loads in (("load", outcome.loads), ("tier_load", outcome.recalls)):
            for seconds, size in loads:
                self.data[f"{name}_seconds"].append(seconds)
                self.data[f"{name}_bytes"].append(size)
        self.data["loads_failed"] += outcome.unloaded
        self.data["sends_failed"] += outcome.unsent
        self.data["tier_loads_failed"] += outcome.missed

    def add_tier(self, before: TierStatistics | None, now: TierStatistics) -> None:
        """Count what the host tier did between two looks at it."""
        for name, value in (
            ("tier_stored_bytes", "bytes_stored"),
            ("tier_evicted_blocks", "evicted_blocks"),
            ("tier_refused_blocks", "refused_blocks"),
        ):
            self.data[name] += getattr(now, value) - (getattr(before, value) if before is not None else 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Those of another worker, or of a later interval, too."""
        for name, value in other.data.items():
            self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line's worth of them."""
        found: dict[str, int | float] = {}
        for name, words in (("load", "Load"), ("tier_load", "Tier load")):
            seconds, size = self.data[f"{name}_seconds"], sum(self.data[f"{name}_bytes"])
            found[f"{words}s"] = len(seconds)
            found[f"{words} avg (ms)"] = round(1000 * sum(seconds) / max(1, len(seconds)), 3)
            found[f"{words} max (ms)"] = round(1000 * max(seconds, default=0), 3)
            found[f"{words} (MB)"] = round(size / 1e6, 3)
        found["Loads failed"] = self.data["loads_failed"]
        found["Sends failed"] = self.data["sends_failed"]
        found["Tier loads failed"] = self.data["tier_loads_failed"]
        found["Tier stored (MB)"] = round(self.data["tier_stored_bytes"] / 1e6, 3)
        found["Tier evicted"] = self.data["tier_evicted_blocks"]
        return found

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class Endpoint(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same in vLLM's Prometheus endpoint, under names that begin with ``vllm:aiokv_``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(kind: type, name: str, text: str, **more: object) -> dict[int, Any]:
            metric = kind(name=f"vllm:aiokv_{name}", documentation=text, labelnames=labelnames, **more)
            found: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
            return found

        self._histograms = {}
        for name, origin in _LOADS.items():
            self._histograms[f"{name}_seconds"] = made(
                self._histogram_cls,
                f"{name}_seconds",
                f"Seconds that loads from {origin} took, from the step that ordered one.",
                buckets=[0.001 * 2**power for power in range(16)],
            )
            self._histograms[f"{name}_bytes"] = made(
                self._histogram_cls,
                f"{name}_bytes",
                f"Bytes that loads from {origin} moved.",
                buckets=[2.0**power for power in range(12, 36, 2)],
            )
        self._counts = {name: made(self._counter_cls, name, text) for name, text in _COUNTS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an interval brought."""
        for name, histogram in self._histograms.items():
            for value in transfer_stats_data[name]:
                histogram[engine_idx].observe(value)
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])
