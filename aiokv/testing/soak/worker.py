"""One engine that does what it is told, in a process of its own, and looks at every byte."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import io
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from aiokv.control.zmq import ZmqChannel
from aiokv.device.base import Buffer, Event
from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.movement import Movement
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import Chunk
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.soak.orders import (
    Changed,
    Ended,
    Explain,
    Explained,
    Finish,
    Health,
    Move,
    Opened,
    Order,
    Probe,
    Promised,
    Reopen,
    Report,
    Start,
    Trip,
    decode_order,
    encode,
)
from aiokv.testing.soak.store import BlocksChanged, Store
from aiokv.transports import cma, shm, tcp

__all__ = ["SETTINGS", "live"]

#: Imported here, before processes are forked, and not by each of them.
LOADED = (ZmqChannel, shm, cma)

#: Short timers, so that much happens in a minute. Copies are cut small, so that they are interrupted.
SETTINGS = Settings(
    contact_ns=SECOND,
    heartbeat_ns=SECOND // 4,
    lease_ns=3 * SECOND // 5,
    drain_ns=SECOND,
    liveness_ns=3 * SECOND // 2,
    close_ns=SECOND // 2,
    tombstone_ns=2 * SECOND,
    chunk_bytes=1 << 17,
)

_LAYERS, _BLOCKS = 4, 48
_HOLDINGS = ("offers", "fetches", "parts", "parked", "leases", "blocks_held", "quarantined", "in_flight")


def live(start: Start, sock: socket.socket) -> None:
    """Be a worker until it is told to finish, or its parent is gone."""
    loops: Callable[[], asyncio.AbstractEventLoop] = (
        uvloop.new_event_loop if start.uvloop else asyncio.SelectorEventLoop
    )
    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(_live(start, sock))


async def _live(start: Start, sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)

    def say(report: Report) -> None:
        writer.write(encode(report))

    def tell(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        say(Changed(f"the loop was told: {context['message']}: {context.get('exception')!r}"))

    asyncio.get_running_loop().set_exception_handler(tell)
    worker = _Worker(start, say)
    await worker.open()
    while line := await reader.readline():
        order = decode_order(line)
        if isinstance(order, Finish):
            say(await worker.finish())
            await writer.drain()
            break
        await worker.obey(order)
    else:
        os._exit(1)  # nobody is there to hear what else there is to say
    writer.close()


class _ProxiedTcp(tcp.TcpTransport):
    """Tells others to dial the proxy."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._proxy = port

    def describe(self) -> bytes:
        host, _, *rest = msgspec.msgpack.decode(super().describe())
        return msgspec.msgpack.encode([host, self._proxy, *rest])

    @property
    def bound(self) -> int:
        """The port that it listens at itself."""
        return int(msgspec.msgpack.decode(super().describe())[1])


class _Worker:
    """An engine, its blocks, and what goes on."""

    def __init__(self, start: Start, say: Callable[[Report], None]) -> None:
        self._start = start
        self._say = say
        self._chance = random.Random(start.seed)  # noqa: S311
        layout = CacheLayout.attention(
            layers=_LAYERS,
            blocks=_BLOCKS,
            block_size=32,
            heads=4,
            head_size=64,
            dtype="float16",
            axes=start.axes or "bthd",
            split=not start.axes,
        )
        self._cache = KVCache.allocate(layout)
        self._store = Store(self._cache, start.seed)
        self._engine: TransferEngine | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._handles: dict[asyncio.Task[None], Offer | Fetch] = {}
        self._before = _held(None)
        #: Copies to go until this process stops itself; 0: it doesn't.
        self._trips = 0
        submit = Movement.submit

        def submit_or_stop(movement: Movement, chunk: Chunk, buffers: Sequence[Buffer]) -> Event:
            self._trip()
            return submit(movement, chunk, buffers)

        # Behind the last look at lease and link, which is the worst moment there is.
        Movement.submit = submit_or_stop  # type: ignore[method-assign, assignment]

    async def open(self) -> None:
        """Open an engine, and say where it is."""
        data = _ProxiedTcp(self._start.data)
        engine = TransferEngine(
            self._cache,
            bind="tcp://127.0.0.1:0",
            advertise=f"tcp://127.0.0.1:{self._start.control}",
            transports=[data if name == "tcp" else name for name in self._start.transports],
            settings=SETTINGS,
        )
        self._engine = await engine.__aenter__()
        self._say(Opened(control=_bound(engine), data=data.bound))

    async def obey(self, order: Order) -> None:
        """Do what can be done now, and begin the rest."""
        match order:
            case Move():
                task = asyncio.get_running_loop().create_task(self._move(order))
                self._tasks.add(task)
                task.add_done_callback(self._over)
            case Reopen():
                if self._engine is not None:
                    await self._engine.aclose()
                self._chance.shuffle(self._start.transports)
                await self.open()
            case Probe():
                self._say(_held(self._engine))
            case Trip():
                self._trips = order.after
            case Explain():
                self._say(Explained(self._explain()))
            case _:
                pass

    def _trip(self) -> None:
        if self._trips:
            self._trips -= 1
            if not self._trips:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._handles.pop(task, None)

    def _explain(self) -> str:
        """What each transfer waits for, and where its task stands."""
        said = io.StringIO()
        print(self._engine, file=said)
        for task, handle in self._handles.items():
            print(handle, file=said)
            task.print_stack(file=said)
        return said.getvalue()

    async def finish(self) -> Health:
        """Close everything; what is left beyond what there was at the start."""
        if self._engine is not None:
            await self._engine.aclose()
        if self._tasks:
            await asyncio.wait(self._tasks)
        found = _held(self._engine)
        found.finished = True
        found.descriptors -= self._before.descriptors
        found.tasks -= self._before.tasks
        found.threads -= self._before.threads
        found.mappings -= self._before.mappings
        self._cache.close()
        return found

    # -- transfers

    async def _move(self, order: Move) -> None:
        engine = self._engine
        try:
            blocks = self._store.take(order.blocks)
        except BlocksChanged as wrong:
            self._say(Changed(str(wrong)))
            return
        if not blocks or engine is None:
            self._say(Ended(order.tid, order.role, "NoRoom"))
            return
        begun, side = time.monotonic(), _Side(order, self._store, blocks, self._say, self._chance)
        try:
            handle = side.handle(engine)
        except AiokvError as error:
            self._end(order, blocks, Ended(order.tid, order.role, type(error).__name__, str(error)))
            return
        task = asyncio.current_task()
        assert task is not None
        self._handles[task] = handle
        for when in order.cancels_s:  # set here, since who is cancelled before his first step says nothing
            asyncio.get_running_loop().call_later(when, task.cancel)
        try:
            await side.run(handle)
        except (AiokvError, asyncio.CancelledError):
            pass  # what became of it, the handle says
        except Exception as error:  # noqa: BLE001 - the parent has to know
            self._say(Changed(f"{order.role} of {order.tid} raised {error!r}"))
        ended = Ended(order.tid, order.role, took_s=time.monotonic() - begun)
        if not side.begun:
            ended.error = "NotBegun"
        elif not handle.done():
            self._say(Changed(f"{order.role} of {order.tid} came back before it was over: {handle!r}"))
        elif handle.error is not None:
            ended.error, ended.text = type(handle.error).__name__, str(handle.error)
        else:
            ended.digest, ended.nbytes = side.digest(), side.nbytes
        ended.transport = ",".join(handle.progress.transports)
        self._end(order, blocks, ended)

    def _end(self, order: Move, blocks: list[int], ended: Ended) -> None:
        self._store.give(blocks)
        self._say(ended)


class _Side:
    """What a worker does within one transfer."""

    def __init__(
        self,
        order: Move,
        store: Store,
        blocks: list[int],
        say: Callable[[Report], None],
        chance: random.Random,
    ) -> None:
        self._order = order
        self._store = store
        self._blocks = blocks
        self._say = say
        self._chance = chance
        #: Of each layer, as it was when it was said to be in place.
        self._seen: dict[int, bytes] = {}
        self.begun = False
        self.nbytes = 0

    def handle(self, engine: TransferEngine) -> Offer | Fetch:
        """The transfer, not begun."""
        order, named = self._order, [self._order.peer] if self._order.peer else []
        if order.role == "producer":
            return engine.offer(order.tid, self._blocks, to=named, deadline=order.deadline_s)
        return engine.fetch(order.tid, self._blocks, sources=named or None, deadline=order.deadline_s)

    async def run(self, handle: Offer | Fetch) -> None:
        """Do this side's work, until it is over."""
        if isinstance(handle, Offer):
            await self._produce(handle)
        else:
            await self._consume(handle)

    async def _produce(self, offer: Offer) -> None:
        data = [self._store.made_up(len(self._blocks)) for _ in range(self._store.layers)]
        self._say(Promised(self._order.tid, _digest([_digest_of(each) for each in data])))
        async with offer:
            self.begun = True
            for layer in self._chance.sample(range(len(data)), len(data)):
                self._store.write(layer, self._blocks, data[layer])
                if self._order.pause_s:
                    await asyncio.sleep(self._order.pause_s * self._chance.random())
                offer.layer_ready(layer)

    async def _consume(self, fetch: Fetch) -> None:
        async with fetch:
            self.begun = True
            if self._order.layerwise:
                for layer in range(self._store.layers):
                    await fetch.layer(layer)
                    self._seen[layer] = self._look(layer)

    def digest(self) -> str:
        """Of what is in place; empty at a producer.

        A layer that was looked at before must be as it was then.
        """
        if self._order.role == "producer":
            return ""
        found = [self._look(layer) for layer in range(self._store.layers)]
        for layer, seen in self._seen.items():
            if found[layer] != seen:
                text = f"layer {layer} of {self._order.tid} changed after it was said to be in place"
                self._say(Changed(text))
        return _digest(found)

    def _look(self, layer: int) -> bytes:
        data = self._store.read(layer, self._blocks)
        self.nbytes += data.nbytes
        return _digest_of(data)


def _digest_of(data: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(data.tobytes(), digest_size=16).digest()


def _digest(layers: list[bytes]) -> str:
    return b"".join(layers).hex()


# -- how this process is ---------------------------------------------------------------------------


def _bound(engine: TransferEngine) -> int:
    """The port that an engine's control channel is bound to."""
    channel = engine._channel
    assert isinstance(channel, ZmqChannel)
    assert channel._receiver is not None
    endpoint = channel._receiver._zmq_sock.get_string(32)  # zmq.LAST_ENDPOINT
    return int(endpoint.rpartition(":")[2])


def _held(engine: TransferEngine | None) -> Health:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free counts for nothing
    found = engine.statistics() if engine is not None else None
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return Health(
        resident=(resident - shared) * os.sysconf("SC_PAGESIZE"),
        descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        mappings=sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        sessions=found.sessions if found else 0,
        holds={name: getattr(found, name) for name in _HOLDINGS} if found else {},
    )
