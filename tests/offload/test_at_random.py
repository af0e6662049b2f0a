"""Many requests at once, with failures, cancellations and resets: never a wrong byte, and nothing left."""

from __future__ import annotations

import pytest

from aiokv.offload.policies import SecondSight
from aiokv.testing.tiers import tier_on
from aiokv.testing.tierusers import disturbed


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("kind", ["host", "mocked"])
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_never_a_wrong_byte(kind: str, policy: str, seed: int) -> None:
    more = {"admission": SecondSight(64)} if seed % 3 == 0 else {}
    async with tier_on(kind, seed, blocks=24, policy=policy, checksums=0.2, **more) as kit:
        users = await disturbed(kit, seed, 150)
        assert users.loaded > 0
