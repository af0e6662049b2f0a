"""What a worker's transfers did, for vLLM's log and for its Prometheus endpoint.

Only what vLLM can't know is told: how long loads took and what they moved, and what came to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from aiokv.integrations.vllm.worker import Outcome

__all__ = ["Endpoint", "Figures"]

#: What is counted, and in what words.
_COUNTS = {
    "loads_failed": "Loads that failed or were given up.",
    "sends_failed": "Requests whose KV nobody took: it was late, was given up, or its reader was lost.",
}


@dataclass
class Figures(KVConnectorStats):  # type: ignore[misc]
    """Figures of one interval; vLLM carries ``data`` between processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {"load_seconds": [], "load_bytes": [], **dict.fromkeys(_COUNTS, 0)}

    def add(self, outcome: Outcome) -> None:
        """Count what came to an end in one step."""
        for seconds, size in outcome.loads:
            self.data["load_seconds"].append(seconds)
            self.data["load_bytes"].append(size)
        self.data["loads_failed"] += len(outcome.failed)
        self.data["sends_failed"] += outcome.unsent

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Those of another worker, or of a later interval, too."""
        for name, value in other.data.items():
            self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line's worth of them."""
        seconds, size = self.data["load_seconds"], sum(self.data["load_bytes"])
        return {
            "Loads": len(seconds),
            "Load avg (ms)": round(1000 * sum(seconds) / max(1, len(seconds)), 3),
            "Load max (ms)": round(1000 * max(seconds, default=0), 3),
            "Loaded (MB)": round(size / 1e6, 3),
            "Loads failed": self.data["loads_failed"],
            "Sends failed": self.data["sends_failed"],
        }

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

        self._seconds = made(
            self._histogram_cls,
            "load_seconds",
            "Seconds that loads took, from the step that ordered one.",
            buckets=[0.001 * 2**power for power in range(16)],
        )
        self._bytes = made(
            self._histogram_cls,
            "load_bytes",
            "Bytes that loads moved.",
            buckets=[2.0**power for power in range(12, 36, 2)],
        )
        self._counts = {name: made(self._counter_cls, name, text) for name, text in _COUNTS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what an interval brought."""
        for seconds in transfer_stats_data["load_seconds"]:
            self._seconds[engine_idx].observe(seconds)
        for size in transfer_stats_data["load_bytes"]:
            self._bytes[engine_idx].observe(size)
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])
