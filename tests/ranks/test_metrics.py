"""Groups of ranks as metrics for Prometheus."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'aiokv[metrics]'")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from aiokv.metrics import RankExporter
from aiokv.ranks import Miss, RankGroup
from aiokv.testing.ranks import MemoryRanks


@pytest.mark.asyncio
async def test_what_a_group_does_is_shown() -> None:
    registry, ranks = CollectorRegistry(), MemoryRanks(2)
    with RankGroup(ranks.collective(0)) as one, RankGroup(ranks.collective(1)) as other:
        with RankExporter(one, registry, {"rank": "0"}) as exporter:
            exporter.add(other, {"rank": "1"})
            await asyncio.gather(one.agree([Miss()]), other.agree([Miss()]))
            await one.agree([])
            await asyncio.gather(one.agree([Miss()]), other.agree([Miss()] * 2), return_exceptions=True)
            shown = generate_latest(registry).decode()
            assert 'aiokv_ranks_batches_total{outcome="agreed",rank="0"} 2.0' in shown
            assert 'aiokv_ranks_batches_total{outcome="differed",rank="1"} 1.0' in shown
            assert 'aiokv_ranks_batches_total{outcome="given_up",rank="1"} 0.0' in shown
            assert 'aiokv_ranks_reductions_total{rank="0"} 2.0' in shown
            with pytest.raises(ValueError, match="of groups already"):
                RankExporter(one, registry)
            with pytest.raises(ValueError, match="own"):
                RankExporter(one, CollectorRegistry(), {"outcome": "x"})
            with pytest.raises(TypeError, match="a group is a RankGroup"):
                exporter.add(5, {"rank": "2"})  # type: ignore[arg-type]
        assert generate_latest(registry) == b""
