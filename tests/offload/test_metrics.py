"""Host tiers as metrics for Prometheus."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'aiokv[metrics]'")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from aiokv.errors import ClosedError
from aiokv.metrics import PoolExporter, TierExporter
from aiokv.offload.sharing.owner import HostPool, PoolStatistics
from aiokv.offload.statistics import TierStatistics
from aiokv.offload.tier import HostTier
from aiokv.testing.tiers import BLOCK, names, tier_on


@pytest.mark.asyncio
async def test_what_a_tier_does_is_shown(seed: int) -> None:
    registry = CollectorRegistry()
    async with tier_on("host", seed) as kit:
        with TierExporter(kit.tier, registry, {"rank": "0"}) as exporter:
            other = HostTier(kit.cache, 4 * BLOCK)
            exporter.add(other, {"rank": "1"})
            await kit.tier.store(names("a", 6), list(range(6)))
            await kit.get(names("a", 8), range(20, 26))
            shown = generate_latest(registry).decode()
            assert f'aiokv_tier_bytes_total{{direction="load",rank="0"}} {6.0 * BLOCK}' in shown
            assert 'aiokv_tier_hit_blocks_total{rank="0"} 6.0' in shown
            assert 'aiokv_tier_miss_blocks_total{rank="0"} 2.0' in shown
            assert 'aiokv_tier_places{rank="0",state="used"} 6.0' in shown
            assert 'aiokv_tier_canary{rank="0"} 1.0' in shown
            assert 'rank="1"' not in shown, "it isn't entered"
            with pytest.raises(ValueError, match="already"):
                TierExporter(kit.tier, registry)
            with pytest.raises(ValueError, match="shown already"):
                exporter.add(kit.tier, {"rank": "5"})
            with pytest.raises(ValueError, match="have the labels"):
                exporter.add(other)
        assert generate_latest(registry) == b""
        with pytest.raises(ClosedError):
            exporter.add(other, {"rank": "2"})
        with pytest.raises(TypeError, match="tier"):
            TierExporter(5, registry)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="own"):
            TierExporter(other, registry, {"state": "x"})


def test_every_count_is_shown() -> None:
    from aiokv.metrics import tiers

    tables = (tiers._COUNTERS, tiers._GAUGES)
    shown = {field for table in tables for _, _, fields in table.values() for field in fields.values()}
    # What these are in bytes is shown.
    assert set(TierStatistics.__slots__) - shown == {"loaded_blocks", "stored_blocks"}


@pytest.mark.asyncio
async def test_what_a_pool_holds_is_shown(seed: int, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    pool = HostPool(tmp_path / "pool", 8 * BLOCK)
    with PoolExporter(pool, registry):
        async with pool, tier_on("host", seed, pool=pool.path) as kit:
            assert await kit.tier.store(names("a", 6), list(range(6))) == 6
            assert await kit.tier.store(names("b", 4), list(range(4))) == 4
            shown = generate_latest(registry).decode()
            assert 'aiokv_pool_guests{state="attached"} 1.0' in shown
            assert 'aiokv_pool_guests{state="lost"} 0.0' in shown
            assert 'aiokv_pool_places{state="used"} 8.0' in shown
            assert "aiokv_pool_evicted_blocks_total 2.0" in shown
            assert f"aiokv_pool_bytes {8.0 * BLOCK}" in shown
    assert generate_latest(registry) == b""


def test_every_count_of_a_pool_is_shown() -> None:
    from aiokv.metrics import pools

    tables = (pools._COUNTERS, pools._GAUGES)
    shown = {field for table in tables for _, _, named in table.values() for field in named.values()}
    assert {field.name for field in fields(PoolStatistics)} == shown
