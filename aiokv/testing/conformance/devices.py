"""What every device must do, as one suite of async functions.

Describe a device by a ``DeviceKit`` and run each of ``CASES`` with it, under any test framework
and on any event loop::

    @pytest.mark.asyncio
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_my_device(case):
        async with MyDeviceKit(seed=1) as kit:
            await case(kit)

The bytes that must have moved are worked out one head at a time, from the layouts alone.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator

import numpy as np

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy
from aiokv.testing.conformance.devicekit import DeviceKit

__all__ = ["CASES", "Case"]


Case = Callable[[DeviceKit], Awaitable[None]]

_FLAT = CacheLayout.attention(layers=1, blocks=16, block_size=4, heads=2, head_size=8, dtype="float16")


def _layout(blocks: int, block_size: int, axes: str, heads: tuple[int, int] = (0, 4)) -> CacheLayout:
    split = "s" not in axes
    return CacheLayout.attention(
        layers=2,
        blocks=blocks,
        block_size=block_size,
        heads=4,
        head_size=8,
        dtype="float16",
        axes=axes,
        split=split,
        rank_heads=heads,
    )


_LAYOUTS = {
    "K and V outermost": _layout(20, 4, "sbthd"),
    "heads before tokens": _layout(10, 16, "bshtd"),
    "K and V apart": _layout(12, 8, "bthd"),
    "half of the heads": _layout(20, 4, "bsthd", heads=(2, 4)),
}


def _blocks(kit: DeviceKit, layout: CacheLayout, tokens: int) -> GroupBlocks:
    """Random blocks for so many tokens, in random order."""
    group = layout.groups[0]
    ids = kit.random.sample(range(group.blocks), -(-tokens // group.block_size))
    return GroupBlocks(0, np.array(ids, dtype=np.int64))


def _heads(side: Side, tokens: range, heads: range) -> Iterator[tuple[int, int]]:
    """Buffer offset and length of each head of each token, in one order for every layout."""
    group, place, blocks = side.layout.groups[0], side.placement.groups[0], side.blocks[0]
    stride_b, stride_s, stride_t, stride_h = place.strides
    for planes in place.layers:
        for half in range(group.halves):
            base = planes[half][1] if group.split else planes[0][1] + half * stride_s
            for token in tokens:
                block = int(blocks.ids[token // group.block_size])
                start = base + block * stride_b + token % group.block_size * stride_t
                for head in heads:
                    yield start + (head - group.heads[0]) * stride_h, group.head_bytes


def _submit(
    kit: DeviceKit, plan: CopyPlan, source: Buffer, target: Buffer, stream: Stream, limit: int = 1 << 20
) -> None:
    """Enqueue all chunks of a plan, in a drawn order, as nothing promises another."""
    chunks = list(plan.chunks(plan.layers, limit))
    kit.random.shuffle(chunks)
    for chunk in chunks:
        kit.device.copy(plan, chunk, [source], [target], stream=stream)


class _Flat:
    """Two whole blocks of a small cache, from one buffer to another: a copy whose bytes don't matter."""

    def __init__(self) -> None:
        place = Placement.dense(_FLAT)
        self.nbytes = place.buffers[0]
        ids = GroupBlocks(0, np.array([3, 9], dtype=np.int64))
        side = Side(_FLAT, place, (ids,))
        self.plan = plan_copy(side, side, first_token=0, tokens=8, heads=(0, 2))
        self._where = list(_heads(side, range(8), range(2)))

    def part(self, data: bytes) -> list[bytes]:
        """What of a buffer's bytes the copy moves."""
        return [data[start : start + length] for start, length in self._where]


async def _done(kit: DeviceKit, event: Event) -> None:
    await kit.settle()
    assert event.done()


# -- events and streams ---------------------------------------------------------------------------


async def tells_what_it_is(kit: DeviceKit) -> None:
    """A kind, and a budget that leaves a loop responsive."""
    assert kit.device.kind in {"host", "cuda", "mocked"}
    assert 0 < kit.device.budget_s < 0.1


async def an_event_becomes_done_and_stays_so(kit: DeviceKit) -> None:
    """Also with nothing before it, and however often one asks."""
    event = kit.device.stream().record()
    await _done(kit, event)
    assert event.done()


async def an_event_done_means_all_before_it_is(kit: DeviceKit) -> None:
    """Events of one stream become done in the order in which they were recorded."""
    flat, stream = _Flat(), kit.device.stream()
    source, target = kit.buffer(kit.noise(flat.nbytes)), kit.buffer(bytes(flat.nbytes))
    events = []
    for _ in range(20):
        _submit(kit, flat.plan, source, target, stream)
        events.append(stream.record())
    # Asked from the last to the first, so that nothing completes in between and looks right.
    seen = [event.done() for event in reversed(events)][::-1]
    assert seen == sorted(seen, reverse=True)
    await _done(kit, events[-1])
    assert all(event.done() for event in events)


async def a_stream_keeps_its_order(kit: DeviceKit) -> None:
    """A copy of a copy has the bytes, without any event between the two."""
    flat, stream = _Flat(), kit.device.stream()
    data = kit.noise(flat.nbytes)
    first, second, third = kit.buffer(data), kit.buffer(bytes(len(data))), kit.buffer(bytes(len(data)))
    _submit(kit, flat.plan, first, second, stream)
    _submit(kit, flat.plan, second, third, stream)
    await _done(kit, stream.record())
    assert flat.part(kit.load(third)) == flat.part(data)


async def a_stream_waits_for_another(kit: DeviceKit) -> None:
    """A copy of a copy on another stream has the bytes, since that stream waits for the event."""
    flat = _Flat()
    data = kit.noise(flat.nbytes)
    first, second, third = kit.buffer(data), kit.buffer(bytes(len(data))), kit.buffer(bytes(len(data)))
    writer, reader = kit.device.stream(), kit.device.stream()
    _submit(kit, flat.plan, first, second, writer)
    written = writer.record()
    reader.wait(written)
    _submit(kit, flat.plan, second, third, reader)
    event = reader.record()
    await _done(kit, event)
    assert written.done()
    assert flat.part(kit.load(third)) == flat.part(data)


async def waiting_for_what_is_done_is_allowed(kit: DeviceKit) -> None:
    """An event that was seen done can still be waited for."""
    event = kit.device.stream().record()
    await _done(kit, event)
    stream = kit.device.stream()
    stream.wait(event)
    await _done(kit, stream.record())


async def records_in_another_thread(kit: DeviceKit) -> None:
    """A model's thread records on its own current stream, and the loop has a side stream wait."""
    events: list[Event] = []
    thread = threading.Thread(target=lambda: events.append(kit.device.adopt(None).record()))
    thread.start()
    thread.join()
    stream = kit.device.stream()
    stream.wait(events[0])
    await _done(kit, stream.record())
    assert events[0].done()


async def adopts_streams(kit: DeviceKit) -> None:
    """The current stream, and the caller's own, can be recorded on and waited for."""
    for caller in (None, kit.foreign_stream()):
        adopted, side = kit.device.adopt(caller), kit.device.stream()
        side.wait(adopted.record())
        adopted.wait(side.record())
        await _done(kit, adopted.record())


# -- copies ---------------------------------------------------------------------------------------


async def copies_between_all_layouts(kit: DeviceKit) -> None:
    """Every head of every token lands where the other layout has it, and nothing else is touched."""
    for name, source_layout in _LAYOUTS.items():
        for other, target_layout in _LAYOUTS.items():
            heads = range(
                max(source_layout.groups[0].heads[0], target_layout.groups[0].heads[0]),
                min(source_layout.groups[0].heads[1], target_layout.groups[0].heads[1]),
            )
            await _moves(kit, source_layout, target_layout, heads, f"{name} to {other}")


async def _moves(
    kit: DeviceKit, source_layout: CacheLayout, target_layout: CacheLayout, heads: range, what: str
) -> None:
    tokens, first = 38, 5
    sides = [
        Side(layout, Placement.dense(layout), (_blocks(kit, layout, tokens),))
        for layout in (source_layout, target_layout)
    ]
    plan = plan_copy(*sides, first_token=first, tokens=tokens, heads=(heads.start, heads.stop))
    before, expected = (kit.noise(side.placement.buffers[0]) for side in sides)
    source, target = kit.buffer(before), kit.buffer(expected)
    wanted = bytearray(expected)
    for (start, length), (to, _) in zip(
        _heads(sides[0], range(first, tokens), heads),
        _heads(sides[1], range(first, tokens), heads),
        strict=True,
    ):
        wanted[to : to + length] = before[start : start + length]
    stream = kit.device.stream()
    _submit(kit, plan, source, target, stream, limit=kit.random.choice([64, 500, 4096, 1 << 20]))
    await _done(kit, stream.record())
    assert kit.load(target) == wanted, what
    assert kit.load(source) == before, what


# -- failing --------------------------------------------------------------------------------------


async def refuses_a_buffer_that_is_too_short(kit: DeviceKit) -> None:
    """Nothing is read or written beyond a buffer; nothing is enqueued either."""
    flat, stream = _Flat(), kit.device.stream()
    whole, short = kit.buffer(kit.noise(flat.nbytes)), kit.buffer(bytes(8))
    for source, target in ((whole, short), (short, whole)):
        try:
            _submit(kit, flat.plan, source, target, stream)
        except DeviceError:
            continue
        raise AssertionError("a copy beyond the end of a buffer was taken")
    await _done(kit, stream.record())
    assert kit.load(short) == bytes(8)


async def a_failed_copy_is_told(kit: DeviceKit) -> None:
    """By the call, or by every event recorded later, which is never done; other streams go on."""
    flat, stream, other = _Flat(), kit.device.stream(), kit.device.stream()
    data = kit.noise(flat.nbytes)
    first, second, third = kit.buffer(data), kit.buffer(bytes(len(data))), kit.buffer(data)
    fine = stream.record()
    kit.break_copy(stream, first)
    try:
        _submit(kit, flat.plan, first, second, stream)
    except DeviceError:
        pass
    else:
        event = stream.record()
        await kit.settle()
        for _ in range(2):
            assert _failed(event)
    assert fine.done()
    _submit(kit, flat.plan, third, second, other)
    await _done(kit, other.record())
    assert flat.part(kit.load(second)) == flat.part(data)


def _failed(event: Event) -> bool:
    try:
        assert not event.done(), "a failed copy's event is done"
    except DeviceError:
        return True
    return False


#: Every case, in reading order.
CASES: tuple[Case, ...] = (
    tells_what_it_is,
    an_event_becomes_done_and_stays_so,
    an_event_done_means_all_before_it_is,
    a_stream_keeps_its_order,
    a_stream_waits_for_another,
    waiting_for_what_is_done_is_allowed,
    records_in_another_thread,
    adopts_streams,
    copies_between_all_layouts,
    refuses_a_buffer_that_is_too_short,
    a_failed_copy_is_told,
)
