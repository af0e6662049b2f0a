"""What is compared is measured in turn."""

from __future__ import annotations

import pytest

from aiokv.bench.rounds import alternate


@pytest.mark.asyncio
async def test_rounds_alternate_and_the_warm_ones_do_not_count() -> None:
    order: list[str] = []

    async def measure(name: str) -> int:
        order.append(name)
        return len(order)

    found = await alternate(2, {"a": lambda: measure("a"), "b": lambda: measure("b")}, warm=1)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3, 6], "b": [4, 5]}
