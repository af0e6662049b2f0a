"""What a worker fetches chunk by chunk, of an engine that is played; of others' in ``test_chunks.py``."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiokv.integrations.vllm.loading import Loading
from aiokv.integrations.vllm.orders import Blocks, Load, Ticket
from aiokv.integrations.vllm.settings import ConnectorSettings

SIZE = 32


class Engine:
    """Another side that has ever more to offer, and nothing new in it."""

    def __init__(self) -> None:
        group = SimpleNamespace(block_size=SIZE)
        self.cache = SimpleNamespace(layout=SimpleNamespace(groups=[group]))
        self.asked: list[float] = []

    def fetch(self, tid: str, blocks: object, *, deadline: float, **more: object) -> Any:
        self.asked.append(deadline)
        assert len(self.asked) < 3 or self.asked[-3] > min(self.asked), "it goes on when its time is over"
        return SimpleNamespace(
            start=lambda: None,
            wait=lambda: asyncio.sleep(0.001),
            cancel=lambda reason: None,
            tokens=SIZE,
            more=True,
            progress=SimpleNamespace(bytes_moved=8),
        )


@pytest.mark.asyncio
async def test_a_load_ends_however_many_chunks_are_offered() -> None:
    engine = Engine()
    loading = Loading(engine, ConnectorSettings.read({"load_timeout": 0.05}), SIZE, None)  # type: ignore[arg-type]
    blocks = Blocks(0, (4, 5, 6))
    load = Load("a", Ticket("t"), ("there",), (blocks,), 0, 3 * SIZE, 1, chunked=True)
    moved, failed = await loading.load(load, None)
    assert moved == 8 * len(engine.asked)
    assert failed == (Blocks(SIZE, (5, 6)),)
