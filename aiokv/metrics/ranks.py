"""What groups of ranks do, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry

from aiokv.metrics.tables import Fields, Shown, TableExporter
from aiokv.ranks.group import RankGroup

__all__ = ["RankExporter"]

_COUNTERS: Fields = MappingProxyType(
    {
        "batches": (
            "Batches that this rank entered, by what became of them",
            "outcome",
            {"agreed": "agreed", "differed": "differed", "given_up": "given_up"},
        ),
        "reductions": ("Reductions that they took", "", {"": "rounds"}),
    }
)


class RankExporter(TableExporter[RankGroup]):
    """Groups of ranks, as this process takes part in them; a context manager that takes it out again.

    Args:
        group: The first of them.
        registry: Where to register; by default prometheus-client's own.
        labels: Put on everything of this group's, the rank say.

    Raises:
        TypeError: An argument of the wrong kind, or labels that aren't strings.
        ValueError: The registry has such metrics already (further groups are added to the exporter that it
            has), or a label's name is one that the metrics have themselves, or none.
    """

    def __init__(
        self,
        group: RankGroup,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        shown = Shown(
            RankGroup, "a group", "aiokv_ranks", _COUNTERS, MappingProxyType({}), RankGroup.statistics
        )
        super().__init__(shown, group, registry, labels)
