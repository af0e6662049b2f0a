"""Caches that don't hold the same KV: whoever asked is told what differs, of a push both sides are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aiokv.engine.engine import TransferEngine
from aiokv.errors import LayoutMismatch, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle, transfer


def changed(**changes: Any) -> CacheLayout:
    """The layout with its group changed."""
    return msgspec.structs.replace(LAYOUT, groups=(msgspec.structs.replace(LAYOUT.groups[0], **changes),))


#: Another model's layouts, and what is said of them and ``LAYOUT``, in either order.
OTHERS = [
    (changed(dtype="int8"), "group 0: dtype (uint8 against int8|int8 against uint8)"),
    (changed(head_size=16), "group 0: head_size (8 against 16|16 against 8)"),
    (changed(heads=(0, 2), total_heads=2), "group 0: total_heads (4 against 2|2 against 4)"),
    (changed(layers=(0, 1, 2)), "group 0: (4 layers against 3|3 layers against 4)"),
    (
        changed(kind="window", window=8),
        "group 0: kind (attention|window) against .*; group 0: window [08] ag",
    ),
    (changed(axes="bthd"), "group 0: halves (2 against 1|1 against 2)"),
    (msgspec.structs.replace(LAYOUT, model=b"n"), "model fingerprint (6d against 6e|6e against 6d)"),
    (msgspec.structs.replace(LAYOUT, model=b""), "model fingerprint (6d against empty|empty against 6d)"),
    (
        CacheLayout(
            groups=tuple(msgspec.structs.replace(LAYOUT.groups[0], layers=half) for half in ((0, 2), (1, 3))),
            model=LAYOUT.model,
        ),
        "(1 KV cache groups against 2|2 KV cache groups against 1)",
    ),
    (changed(dtype="int8", head_size=16), "group 0: head_size .* against .*; group 0: dtype .* against"),
]


def memory_of(engine: TransferEngine) -> bytes:
    """All that is in its cache."""
    view: memoryview = engine.cache.buffers[0].view  # type: ignore[attr-defined]
    return view.tobytes()


def blocks_for(engine: TransferEngine) -> list[Any]:
    """Two blocks of each group."""
    groups = len(engine.cache.layout.groups)
    return [1, 2] if groups == 1 else [[1, 2]] * groups


differences = pytest.mark.parametrize(
    ("other", "text"), OTHERS, ids=[text.partition(" (")[0].removeprefix("(") for _, text in OTHERS]
)


@differences
@pytest.mark.asyncio
async def test_who_fetches_is_told_what_differs_and_the_offer_waits_for_whom_it_fits(
    other: CacheLayout, text: str
) -> None:
    async with Engines() as engines:
        producer, alike = await engines.add("p"), await engines.add("alike")
        stranger = await engines.add("stranger", other)
        before = memory_of(stranger)
        async with producer.offer("t", [1, 2]) as offer:
            with pytest.raises(LayoutMismatch, match=f"^transfer 't': .*memory://p differ: {text}") as caught:
                async with stranger.fetch("t", blocks_for(stranger), sources=[producer.address]):
                    pass
            assert isinstance(caught.value, ValueError)
            await settle(producer, stranger)
            assert not offer.done()
            fetch = alike.fetch("t", [3, 4], sources=[producer.address])
            fetch.start()
        await fetch.wait()
        assert memory_of(stranger) == before
        await settle(producer, alike, stranger)
        check_idle(producer, alike, stranger)


@differences
@pytest.mark.asyncio
async def test_of_a_push_both_sides_are_told_what_differs(other: CacheLayout, text: str) -> None:
    async with Engines() as engines:
        producer, alike = await engines.add("p"), await engines.add("alike")
        stranger = await engines.add("stranger", other)
        before = memory_of(stranger)
        fetch = stranger.fetch("t", blocks_for(stranger))
        fetch.start()
        said = f"this cache and that of memory://stranger differ: {text}"
        with pytest.raises(LayoutMismatch, match=f"^transfer 't': {said}"):
            async with producer.offer("t", [1, 2], to=[stranger.address]):
                pass
        with pytest.raises(LayoutMismatch, match=f"given up by the producer at memory://p: .*{said}"):
            await fetch.wait()
        assert memory_of(stranger) == before
        await settle(producer, alike, stranger)
        check_idle(producer, alike, stranger)
        await transfer(producer, alike, "afterwards", push=True)


@pytest.mark.asyncio
async def test_what_a_copy_plan_can_bridge_is_no_difference() -> None:
    async with Engines() as engines:
        producer = await engines.add("p", changed(blocks=32, block_size=2, axes="bshtd"))
        consumer = await engines.add("c", changed(blocks=4, block_size=8, axes="bthd", split=True))
        fetch = consumer.fetch("t", [2], sources=[producer.address])
        async with producer.offer("t", [3, 1, 4, 5]):
            fetch.start()
        await fetch.wait()
        assert np.array_equal(kv_of(producer.cache, [3, 1, 4, 5]), kv_of(consumer.cache, [2]))


@pytest.mark.asyncio
async def test_heads_that_no_source_has_are_named_and_nobody_was_asked() -> None:
    async with Engines() as engines:
        low, high = await engines.add("low", heads=(0, 2)), await engines.add("high", heads=(3, 4))
        consumer, alike = await engines.add("c"), await engines.add("d", heads=(0, 2))
        offers = [each.offer("t", [1, 2]) for each in (low, high)]
        for offer in offers:
            offer.start()
        missing = r"group 0: no source holds KV head 2 of 0\.\.3 \(the sources hold 0\.\.1, 3\.\.3\)"
        with pytest.raises(LayoutMismatch, match=missing):
            async with consumer.fetch("t", [1, 2], sources=[low.address, high.address]):
                pass
        await settle(low, high, consumer)
        check_idle(consumer)
        for offer in offers:
            assert not offer.done()
            offer.cancel()
            with pytest.raises(TransferAborted):
                await offer.wait()
        check_idle(low, high)
        await transfer(low, alike, "afterwards")
