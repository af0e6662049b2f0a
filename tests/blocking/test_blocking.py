"""Engines and tiers for callers that have no event loop."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

import aiokv
from aiokv import blocking
from aiokv.offload.events import BlocksStored

LAYOUT = aiokv.CacheLayout.attention(layers=3, blocks=16, block_size=4, heads=2, head_size=8, dtype="float32")


def planes(engine: blocking.TransferEngine | blocking.HostTier) -> list[torch.Tensor]:
    return [plane for layer in range(LAYOUT.layers) for plane in engine.cache.tensor(layer)]


def content(engine: blocking.TransferEngine | blocking.HostTier, blocks: list[int]) -> torch.Tensor:
    return torch.stack([plane[blocks] for plane in planes(engine)])


@pytest.fixture
def pair() -> Iterator[tuple[blocking.TransferEngine, blocking.TransferEngine]]:
    """A producer and a consumer, in threads of their own."""
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            cache = stack.enter_context(aiokv.KVCache.allocate(LAYOUT))
            engine = blocking.TransferEngine(aiokv.TransferEngine(cache, transports=["tcp"]))
            made.append(stack.enter_context(engine))
            for plane in planes(engine):
                plane.copy_(torch.rand_like(plane))
        yield made[0], made[1]


Pair = tuple[blocking.TransferEngine, blocking.TransferEngine]


def test_a_transfer(pair: Pair) -> None:
    left, right = pair
    sent = content(left, [1, 2])
    with left.offer("t", [1, 2], hold=20) as offer:
        right.renew("t", sources=[left.address])
        wanted = left.wanted("u")
        fetch = right.fetch("t", [5, 6], sources=[left.address])
        with fetch:
            for layer in range(LAYOUT.layers):
                offer.layer_ready(layer)
                fetch.layer(layer).result()
        assert sorted(fetch.layers()) == [0, 1, 2]
        assert not fetch.more
    wanted.cancel()
    assert torch.equal(content(right, [5, 6]), sent)
    assert offer.done()
    assert (offer.tokens, fetch.tokens) == (8, 8)
    assert fetch.progress.bytes_moved == sent.numel() * 4
    assert right.statistics().bytes_received == sent.numel() * 4


def test_whoever_leaves_normally_has_written_everything(pair: Pair) -> None:
    left, right = pair
    fetch = right.fetch("t", [5], sources=[left.address])
    fetch.start()
    with left.offer("t", [1]) as offer:
        offer.layer_ready(1)
    fetch.wait().result()
    assert torch.equal(content(right, [5]), content(left, [1]))


def test_an_exception_gives_up_on_both_sides(pair: Pair) -> None:
    left, right = pair
    fetch = right.fetch("t", [5], sources=[left.address])
    fetch.start()
    with pytest.raises(KeyError), left.offer("t", [1]):
        raise KeyError
    with pytest.raises(aiokv.TransferAborted, match="KeyError"):
        fetch.wait().result()
    assert isinstance(fetch.error, aiokv.TransferAborted)


def test_given_up(pair: Pair) -> None:
    left, _ = pair
    offer = left.offer("t", [1])
    with pytest.raises(aiokv.LocalProtocolError):
        offer.cancel()
    offer.start()
    waits = offer.wait()
    assert "t" in repr(offer)
    assert offer.explain()
    assert not offer.done()
    offer.cancel("enough")
    with pytest.raises(aiokv.TransferAborted, match="enough"):
        waits.result()


def test_many_threads(pair: Pair) -> None:
    left, right = pair
    with concurrent.futures.ThreadPoolExecutor(4) as pool:

        def move(at: int) -> None:
            with right.fetch(f"t{at}", [at], sources=[left.address]), left.offer(f"t{at}", [at]):
                pass

        list(pool.map(move, range(12)))
    assert torch.equal(content(right, list(range(12))), content(left, list(range(12))))


def test_what_was_not_entered_has_no_thread() -> None:
    with aiokv.KVCache.allocate(LAYOUT) as cache:
        engine = blocking.TransferEngine(aiokv.TransferEngine(cache))
        with pytest.raises(aiokv.ClosedError):
            engine.offer("t", [1])
        engine.close()


def test_what_cant_be_entered_leaves_no_thread() -> None:
    before = threading.active_count()
    with aiokv.KVCache.allocate(LAYOUT) as cache:
        engine = aiokv.TransferEngine(cache, bind="tcp://203.0.113.1:1", insecure=True)
        with pytest.raises(OSError), blocking.TransferEngine(engine):
            pass
    assert threading.active_count() == before


def test_a_tier_beside_an_engine(pair: Pair) -> None:
    left, _ = pair
    tier = aiokv.HostTier(left.cache, "1MiB", engine=left.engine)
    before = content(left, [1, 2, 3])
    with blocking.HostTier(tier, thread=left.thread) as kept:
        kept.grown().result()
        events = kept.events()
        assert kept.store(["a", "b", "c"], [1, 2, 3], tokens=list(range(12))).result() == 3
        stored = next(events)
        assert isinstance(stored, BlocksStored)
        assert stored.tokens == tuple(range(12))
        with kept.lookup(["a", "b", "x"]) as hit:
            assert (len(hit), hit.tokens) == (2, 8)
            assert kept.load(hit, [8, 9]).result() == 2
        with kept.lookup(["a", "b", "c"]) as hit:
            *_, last = kept.loading(hit, [10, 11, 12], priority=1)
        assert last == 3
        assert torch.equal(content(left, [8, 9]), before[:, :2])
        assert torch.equal(content(left, [10, 11, 12]), before)
        assert kept.exists(["a", "c"]).result() == 2
        assert kept.delete(["c"]).result() == 1
        assert kept.worth_loading(1000, 1.0)
        assert kept.reset().result().blocks == 2
        assert kept.statistics().stored_blocks == 3
        with pytest.raises(aiokv.InvalidBlocks):
            kept.store(["a"], [99]).result()
    kept.close()
    assert left.thread.call(lambda: True)  # it is the engine's, and goes on


def test_a_tier_alone() -> None:
    with (
        aiokv.KVCache.allocate(LAYOUT) as cache,
        blocking.HostTier(aiokv.HostTier(cache, "1MiB")) as tier,
    ):
        assert tier.block_size == 4
        assert tier.store(["a"], [1]).result() == 1
