"""Several readers, several sources, ranks that share out heads differently; priorities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import PeerLostError, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle, transfer

BLOCK_SIZE = LAYOUT.groups[0].block_size
#: As MLA keeps it: one latent head, the same on every rank.
LATENT = CacheLayout.attention(
    layers=4, blocks=16, block_size=4, heads=1, head_size=8, dtype="uint8", axes="btd"
)


def with_blocks_of(block_size: int, blocks: int) -> CacheLayout:
    """The layout with other blocks."""
    group = msgspec.structs.replace(LAYOUT.groups[0], block_size=block_size, blocks=blocks)
    return msgspec.structs.replace(LAYOUT, groups=(group,))


def heads_of(engine: TransferEngine) -> tuple[int, int]:
    return engine.cache.layout.groups[0].heads


def shared_heads(a: TransferEngine, b: TransferEngine) -> range:
    """The heads that both ranks keep."""
    (first, last), (low, high) = heads_of(a), heads_of(b)
    return range(max(first, low), min(last, high))


def partners(engine: TransferEngine, others: Sequence[TransferEngine]) -> list[str]:
    """Addresses of those who keep some of its heads."""
    return [other.address for other in others if shared_heads(engine, other)]


def check_same(
    a: TransferEngine, there: Sequence[int], b: TransferEngine, here: Sequence[int], tokens: int
) -> None:
    """The heads that both ranks keep hold the same tokens."""
    shared = shared_heads(a, b)
    assert shared
    found = []
    for engine, blocks in ((a, there), (b, here)):
        first = heads_of(engine)[0]
        kv = kv_of(engine.cache, blocks)
        found.append(kv[:, :, :tokens, shared.start - first : shared.stop - first])
    assert np.array_equal(found[0], found[1])


# -- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.asyncio
async def test_an_offer_is_over_when_all_its_readers_are(push: bool) -> None:
    async with Engines() as engines:
        producer, *readers = [await engines.add(name) for name in "pabc"]
        to = [reader.address for reader in readers] if push else []
        offer = producer.offer("t", [1, 2], readers=None if push else 3, to=to)
        offer.start()
        for layer in range(4):
            offer.layer_ready(layer)
        for reader in readers:
            await settle(producer, *readers)
            assert not offer.done()
            assert producer.statistics().blocks_held == 2
            async with reader.fetch("t", [3, 4], sources=None if push else [producer.address]):
                pass
            check_same(producer, [1, 2], reader, [3, 4], 8)
        await offer.wait()
        assert offer.progress.parts == {"landed": 3}
        await settle(producer, *readers)
        check_idle(producer, *readers)


@pytest.mark.asyncio
async def test_who_is_named_and_who_comes_by_itself() -> None:
    async with Engines() as engines:
        producer, named, other = [await engines.add(name) for name in "pno"]
        pushed, pulled = named.fetch("t", [3]), other.fetch("t", [3], sources=[producer.address])
        async with producer.offer("t", [1], to=[named.address], readers=2):
            pulled.start()
            pushed.start()
        await pushed.wait()
        await pulled.wait()
        check_same(producer, [1], named, [3], 4)
        check_same(producer, [1], other, [3], 4)


@pytest.mark.asyncio
async def test_readers_that_fail_do_not_interrupt_the_body_of_the_offer() -> None:
    async with Engines() as engines:
        producer, first, second = [await engines.add(name) for name in "pab"]
        body = []
        with pytest.raises(TransferAborted, match="given up by the consumer at memory://a: no use"):
            async with producer.offer("t", [1], readers=2) as offer:
                fetches = [engine.fetch("t", [2], sources=[producer.address]) for engine in (first, second)]
                for fetch in fetches:
                    fetch.start()
                await settle(producer, first, second)
                for layer, fetch in enumerate(fetches):
                    fetch.cancel("no use")
                    await settle(producer, first, second)
                    assert isinstance(offer.error, TransferAborted)
                    assert offer.done() is (layer == 1)
                    offer.layer_ready(layer)
                    body.append(layer)
        assert body == [0, 1]
        for fetch in fetches:
            with pytest.raises(TransferAborted):
                await fetch.wait()
        check_idle(producer, first, second)


@pytest.mark.asyncio
async def test_a_reader_that_fails_leaves_the_others_going_and_the_offer_tells_of_it() -> None:
    async with Engines() as engines:
        producer, well, ill = [await engines.add(name) for name in "pwi"]
        offer = producer.offer("t", [1, 2], readers=2)
        good, bad = [each.fetch("t", [3, 4], sources=[producer.address]) for each in (well, ill)]
        for handle in (offer, good, bad):
            handle.start()
        offer.layer_ready(0)
        await good.layer(0)
        await bad.layer(0)
        bad.cancel("no longer wanted")
        with pytest.raises(TransferAborted, match="transfer 't': no longer wanted"):
            await bad.wait()
        await settle(producer, ill)
        assert offer.progress.parts == {"moving": 1, "aborted": 1}
        for layer in (1, 2, 3):
            offer.layer_ready(layer)
        await good.wait()
        check_same(producer, [1, 2], well, [3, 4], 8)
        told = "given up by the consumer at memory://i: no longer wanted"
        with pytest.raises(TransferAborted, match=told):
            await offer.wait()
        assert producer.statistics().parts_ended == {"landed": 1, "failed": 0, "aborted": 1}
        check_idle(producer, well, ill)


# -- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("producers", "consumers"),
    [
        ([(0, 2), (2, 4)], [(0, 4)]),
        ([(0, 4)], [(0, 2), (2, 4)]),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 2), (2, 4)]),
        ([(0, 2), (2, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([(0, 3), (3, 4)], [(0, 1), (1, 4)]),
    ],
    ids=["2 to 1", "1 to 2", "4 to 2", "2 to 4", "unevenly"],
)
@pytest.mark.asyncio
async def test_ranks_that_share_out_the_heads_differently(
    producers: list[tuple[int, int]], consumers: list[tuple[int, int]], push: bool
) -> None:
    async with Engines() as engines:
        sources = [await engines.add(f"p{number}", heads=heads) for number, heads in enumerate(producers)]
        # Their blocks are twice as large, and hold the same tokens.
        large = with_blocks_of(2 * BLOCK_SIZE, 8)
        targets = [
            await engines.add(f"c{number}", large, heads=heads) for number, heads in enumerate(consumers)
        ]

        handles: list[Offer | Fetch] = []
        for target in targets:
            them = partners(target, sources)
            named: dict[str, Any] = {"parts": len(them)} if push else {"sources": them}
            handles.append(target.fetch("t", [5, 2], **named))
        offers = []
        for source in sources:
            them = partners(source, targets)
            named = {"to": them} if push else {"readers": len(them)}
            offers.append(source.offer("t", [7, 1, 3], tokens=11, **named))
        for handle in [*handles, *offers]:
            handle.start()
        for layer, offer in product(range(4), offers):
            await settle(*sources, *targets)
            offer.layer_ready(layer)
        for handle in [*handles, *offers]:
            await handle.wait()
        for source, target in product(sources, targets):
            if shared_heads(source, target):
                check_same(source, [7, 1, 3], target, [5, 2], 11)
        assert sum(handle.progress.bytes_total for handle in handles) == 11 * 4 * LAYOUT.groups[0].token_bytes
        await settle(*sources, *targets)
        check_idle(*sources, *targets)


@pytest.mark.asyncio
async def test_a_layer_is_in_place_when_all_sources_have_brought_it() -> None:
    async with Engines() as engines:
        low, high = await engines.add("low", heads=(0, 2)), await engines.add("high", heads=(2, 4))
        consumer = await engines.add("c")
        fetch = consumer.fetch("t", [3], sources=[low.address, high.address])
        landed: list[int] = []
        async with low.offer("t", [1]) as first, high.offer("t", [2]) as second:
            fetch.start()
            await settle(low, high, consumer)
            for layer in range(4):
                first.layer_ready(layer)
                await settle(low, high, consumer)
            assert fetch.progress.layers == 0
            assert fetch.progress.parts == {"landed": 1, "granted": 1}
            for layer in (2, 0):
                second.layer_ready(layer)
                landed.append(layer)
                await fetch.layer(layer)
                assert fetch.progress.layers == len(landed)
        await fetch.wait()


@pytest.mark.asyncio
async def test_a_source_that_has_nothing_to_add_ends_at_once() -> None:
    async with Engines() as engines:
        first, second, consumer = [await engines.add(name, LATENT) for name in "fsc"]
        fetch = consumer.fetch("t", [3], sources=[first.address, second.address])
        one, other = first.offer("t", [1]), second.offer("t", [1])
        for handle in (fetch, one, other):
            handle.start()
        await other.wait()  # though nothing is written yet
        assert not one.done()
        for layer in range(4):
            one.layer_ready(layer)
        await fetch.wait()
        await one.wait()
        check_same(first, [1], consumer, [3], 4)
        assert fetch.progress.bytes_moved == 4 * LATENT.groups[0].block_bytes
        check_idle(first, second, consumer)


@pytest.mark.asyncio
async def test_the_first_source_that_fails_ends_the_others() -> None:
    async with Engines() as engines:
        low, high = await engines.add("low", heads=(0, 2)), await engines.add("high", heads=(2, 4))
        consumer, whole = await engines.add("c"), await engines.add("w")
        fetch = consumer.fetch("t", [3], sources=[low.address, high.address])
        first, second = low.offer("t", [1]), high.offer("t", [2])
        for handle in (fetch, first, second):
            handle.start()
        first.layer_ready(0)
        second.layer_ready(0)
        await fetch.layer(0)
        first.cancel("preempted")
        told = "given up by the producer at memory://low: preempted"
        with pytest.raises(TransferAborted, match=f"^transfer 't': {told}"):
            await fetch.wait()
        with pytest.raises(TransferAborted, match="preempted"):
            await first.wait()
        sibling = f"by the consumer at memory://c: another part failed: {told}"
        with pytest.raises(TransferAborted, match=sibling):
            await second.wait()
        assert consumer.statistics().parts_ended == {"landed": 0, "failed": 0, "aborted": 2}
        await settle(low, high, consumer)
        check_idle(low, high, consumer)
        await transfer(whole, consumer, "afterwards")


@pytest.mark.asyncio
async def test_a_source_that_is_closed_ends_the_fetch_and_the_other_source() -> None:
    async with Engines() as engines:
        low, high = await engines.add("low", heads=(0, 2)), await engines.add("high", heads=(2, 4))
        consumer = await engines.add("c")
        fetch = consumer.fetch("t", [3], sources=[low.address, high.address])
        second = high.offer("t", [2])
        fetch.start()
        second.start()
        await settle(low, high, consumer)
        await engines.close(low)
        with pytest.raises(PeerLostError, match="memory://low closed"):
            await fetch.wait()
        with pytest.raises(TransferAborted, match="another part failed"):
            await second.wait()
        await settle(high, consumer)
        check_idle(high, consumer)


# -- priorities -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_more_urgent_goes_first_whatever_came_first() -> None:
    device = MockedDevice(seed=1)
    # One copy at a time, of one block's K or V.
    small = Settings(chunk_bytes=1, window_bytes=1)
    async with Engines() as engines:
        producer = await engines.add("p")
        consumer = await engines.add("c", device=device, settings=small)
        handles = {}
        for name, priority, block in (("later", -1, 1), ("now", 5, 3), ("soon", 0, 5)):
            offer = producer.offer(name, [block])
            offer.start()
            for layer in range(4):
                offer.layer_ready(layer)
            handles[name] = consumer.fetch(name, [block], sources=[producer.address], priority=priority)
            handles[name].start()
        device.run()
        order: list[str] = []

        async def wait(name: str) -> None:
            await handles[name].wait()
            order.append(name)

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(wait(name)) for name in handles]
            while not all(task.done() for task in waiting):
                device.run()
                await asyncio.sleep(0)
        assert order == ["now", "soon", "later"]
