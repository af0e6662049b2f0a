"""The users of simulated engines: a prefill that offers and a decode that fetches, each as one task.

They check at once what can be checked at once: that the blocks are theirs again when the ``async with`` is
left, however it is left, and that what was fetched is what the model wrote.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from aiokv.device.mocked import MockedStream
from aiokv.device.mockedstream import MockedEvent
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError, ClosedError, DeviceError
from aiokv.testing.simulation.ledger import Blocks, Bytes, Offsets, truth
from aiokv.testing.simulation.records import Record
from aiokv.testing.simulation.scenario import FetchPlan, OfferPlan, Request

if TYPE_CHECKING:
    from aiokv.testing.simulation.process import Process

__all__ = ["fetch", "offer"]


class BodyError(Exception):
    """What a body raises of its own."""


async def offer(process: Process, request: Request, plan: OfferPlan) -> None:
    """A prefill: take blocks, compute layer by layer, offer them meanwhile."""
    world, ledger = process.world, process.ledger
    blocks = ledger.take(request.tokens)
    if blocks is None:
        world.leave_out(process, request, "it has no blocks left")
        return
    try:
        handle = process.engine.offer(
            request.tid,
            blocks if len(blocks) > 1 else blocks[0],
            tokens=request.tokens,
            readers=plan.readers,
            to=world.scenario.addresses(plan.to, alias=plan.alias),
            attempt=request.attempt,
            deadline=plan.deadline,
            hold=plan.hold or None,
        )
    except ClosedError:
        ledger.put_back(blocks)
        return
    record = world.record(process, handle, request, plan)
    model = _Model(process, request, plan, blocks)
    await _live_through(record, handle, model.run(handle))
    if not record.quarantined:
        with world.excusing(record):
            ledger.give_up(blocks, None if model.through else model.stream)


class _Model:
    """Writes the layers, as kernels on its stream, and says so."""

    def __init__(self, process: Process, request: Request, plan: OfferPlan, blocks: Blocks) -> None:
        self.stream: MockedStream = process.device.stream()
        self._process, self._request, self._plan, self._blocks = process, request, plan, blocks
        self._rng = random.Random(plan.seed)  # noqa: S311
        self._written: MockedEvent | None = None

    @property
    def through(self) -> bool:
        """Whether the host knows that nothing of it runs any more."""
        return _over(self._written)

    async def run(self, handle: Offer) -> None:
        order = list(range(self._process.cache.layout.layers))
        # What isn't announced is announced where an async with is left.
        late = self._plan.order == "late" and self._plan.style == "with"
        if self._plan.order == "shuffled":
            self._rng.shuffle(order)
        for number, layer in enumerate(order):
            if self._plan.pace:
                await asyncio.sleep(self._rng.expovariate(1 / self._plan.pace))
            if self._plan.raises == number:
                raise BodyError(f"before layer {layer}")
            self._write(layer)
            if not late:
                handle.layer_ready(layer, stream=self.stream)
        if late:
            # What is left to the end is ordered after the default stream, so that has to wait for ours.
            self._process.device.adopt(None).wait(self.stream.record())

    def _write(self, layer: int) -> None:
        ledger, request = self._process.ledger, self._request
        where = ledger.at(layer, self._blocks, 0, request.tokens)
        content = truth(self._process.world.content(request), ledger.layout, layer, request.tokens)
        ledger.write(where, content[:, :, ledger.heads(layer)], self.stream)
        self._written = self.stream.record()


async def fetch(process: Process, request: Request, plan: FetchPlan) -> None:
    """A decode: take blocks, fetch into them, use each layer as it comes."""
    world, ledger = process.world, process.ledger
    await _wait_in_queue(process, request, plan)
    room = max(plan.room, 1)
    blocks = ledger.take(room)
    if blocks is None:
        world.leave_out(process, request, "it has no blocks left")
        return
    consumer = _Consumer(process, request, plan, blocks)
    sources = None if plan.sources is None else world.scenario.addresses(plan.sources, alias=plan.alias)
    try:
        handle = process.engine.fetch(
            request.tid,
            blocks if len(blocks) > 1 else blocks[0],
            sources=sources,
            parts=plan.parts if sources is None else None,
            first_token=plan.first_token,
            tokens=plan.tokens,
            attempt=request.attempt,
            deadline=plan.deadline,
            priority=plan.priority,
            stream=consumer.stream,
        )
    except (ClosedError, ValueError) as error:
        world.note(process.name, f"can't fetch {request.tid}: {error}")
        ledger.give_up(blocks, consumer.stream)
        return
    record = world.record(process, handle, request, plan)
    await _live_through(record, handle, consumer.use(handle))
    if record.landed:
        await consumer.check(handle)
    if not record.quarantined:
        ledger.give_up(blocks, consumer.stream if consumer.busy else None)


async def _wait_in_queue(process: Process, request: Request, plan: FetchPlan) -> None:
    """It has no blocks yet, and says that it will fetch."""
    world = process.world
    until = world.time.now + int(plan.queued * 1e9)
    sources = None if plan.sources is None else world.scenario.addresses(plan.sources, alias=plan.alias)
    while world.time.now < until:
        with suppress(ClosedError):
            process.engine.renew(request.tid, sources=sources, attempt=request.attempt)
        await asyncio.sleep(min(plan.period, plan.queued))


class _Consumer:
    """Knows what the blocks held before, and what they have to hold afterwards."""

    def __init__(self, process: Process, request: Request, plan: FetchPlan, blocks: Blocks) -> None:
        self._process, self._request, self._plan, self._blocks = process, request, plan, blocks
        self.stream: MockedStream = process.device.stream()
        self._before: MockedEvent | None = None
        if plan.busy:  # what is enqueued now comes before anything that the fetch writes
            process.ledger.overwrite(blocks, self.stream)
            self._before = self.stream.record()
        self._reads: list[tuple[int, list[Bytes]]] = []
        self._read: MockedEvent | None = None

    @property
    def busy(self) -> bool:
        """Whether something of the caller's own may still run on its stream."""
        return not all(_over(event) for event in (self._before, self._read))

    async def use(self, handle: Fetch) -> None:
        """The body of the ``async with``."""
        layers = range(self._process.cache.layout.layers)
        if self._plan.raises >= 0:
            await handle.layer(min(self._plan.raises, len(layers) - 1))
            raise BodyError("in the middle")
        match self._plan.body:
            case "layers":
                seen = [layer async for layer in handle.layers() if self._check_layer(handle, layer)]
                if sorted(seen) != list(layers):
                    raise AssertionError(f"layers() gave {seen}")
            case "each":
                for layer in layers:
                    await handle.layer(layer)
                    self._check_layer(handle, layer)
            case "ordered":
                for layer in layers:
                    await handle.layer_ordered(layer)
                    where, _ = self._moved(handle, layer)
                    if where.size:
                        self._reads.append((layer, self._process.ledger.read_later(where, self.stream)))
                        self._read = self.stream.record()
            case "waiters":
                await self._wait_with_others(handle)

    async def _wait_with_others(self, handle: Fetch) -> None:
        """Several wait; cancelling one of them changes nothing for the others."""
        waiters = [asyncio.ensure_future(handle.wait()) for _ in range(3)]
        try:
            await asyncio.sleep(0)
            waiters[0].cancel()
            results = await asyncio.gather(*waiters, return_exceptions=True)
        finally:
            for waiter in waiters:
                waiter.cancel()
        if not isinstance(results[0], asyncio.CancelledError) and not handle.done():
            raise AssertionError(f"a cancelled waiter got {results[0]!r}")
        for result in results[1:]:
            if (result is None) is not (handle.error is None):
                raise AssertionError(f"a waiter got {result!r} of {handle!r}")

    # -- what has to be where

    def _moved(self, handle: Fetch, layer: int) -> tuple[Offsets, Bytes]:
        """Where the transfer writes, and what."""
        ledger, request = self._process.ledger, self._request
        tokens = request.tokens if self._plan.tokens is None else self._plan.tokens
        first = min(self._plan.first_token, tokens)
        where = ledger.at(layer, self._blocks, first, tokens)
        content = truth(self._process.world.content(request), ledger.layout, layer, request.tokens)
        return where, content[first:tokens, :, ledger.heads(layer)]

    def _check_layer(self, handle: Fetch, layer: int) -> bool:
        if handle.error is None:
            where, content = self._moved(handle, layer)
            if where.size and not np.array_equal(self._process.ledger.read(where), content):
                raise AssertionError(f"layer {layer} of {handle!r} is in place with wrong bytes")
        return True

    async def check(self, handle: Fetch) -> None:
        """It ended well: every byte of the blocks is the model's, or what it was before."""
        ledger = self._process.ledger
        while self.busy:  # noqa: ASYNC110 - nothing tells of a mocked event
            await asyncio.sleep(0.001)
        if self._process.broken:
            return  # its own kernels may have failed
        for layer in range(ledger.layout.layers):
            where, content = self._moved(handle, layer)
            if where.size:
                ledger.expect(where, content)
        where = ledger.all_of(self._blocks)
        found = ledger.read(where)
        if not np.array_equal(found, ledger.shadow[where]):
            wrong = int(np.count_nonzero(found != ledger.shadow[where]))
            raise AssertionError(f"{wrong} of {found.size} bytes are wrong after {handle!r} ended well")
        for layer, result in self._reads:
            _, content = self._moved(handle, layer)
            if not result or not np.array_equal(result[0], content):
                raise AssertionError(f"layer {layer} of {handle!r} was read in order, with wrong bytes")


def _over(event: MockedEvent | None) -> bool:
    """Whether what was enqueued before an event is known to run no more."""
    try:
        return event is None or event.done()
    except DeviceError:
        return True


async def _live_through(record: Record, handle: Offer | Fetch, body: Coroutine[None, None, None]) -> None:
    """Run a transfer with its body, take down how it ended, and check that it has."""
    try:
        await (_start_and_wait if record.plan.style == "start" else _within)(record, handle, body)
    except (AiokvError, BodyError, TimeoutError, asyncio.CancelledError) as error:
        record.over(error)
    else:
        record.over(None)
    finally:
        body.close()


async def _within(record: Record, handle: Offer | Fetch, body: Coroutine[None, None, None]) -> None:
    async with handle:
        record.begun()
        await _body(record, body)


async def _start_and_wait(record: Record, handle: Offer | Fetch, body: Coroutine[None, None, None]) -> None:
    handle.start()
    record.begun()
    try:
        await _body(record, body)
        await handle.wait()
    except (AiokvError, BodyError, TimeoutError, asyncio.CancelledError):
        handle.cancel("given up")
        while True:
            with suppress(AiokvError, asyncio.CancelledError):
                await handle.wait()
            if handle.done():
                raise


async def _body(record: Record, body: Coroutine[None, None, None]) -> None:
    try:
        async with asyncio.timeout(record.plan.timeout or None):
            await body
    except (AiokvError, BodyError, TimeoutError, asyncio.CancelledError):
        record.settled()
        raise
    finally:
        record.body_over()
