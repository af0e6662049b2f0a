"""Engines' data planes in another process, used from this one as if they were here.

The child runs a loop of its own. What is asked of a proxy here is done to the object there, and
what happens there (a link is lost, bytes landed) is told here. Both are this very file, so what
goes between them can be Python objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import itertools
import os
import pickle  # noqa: TID251 - between a test and its own child
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from aiokv.device.cache import KVCache
from aiokv.device.host import HostDevice
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.testing.conformance.transportkit import Engine, TransportKit, contents, fill

SIZE = struct.Struct("!Q")
PATIENCE_S = 30
#: Kept by number at the other side, so that they need to be sent once.
BY_NUMBER = (CopyPlan,)


class Wire:
    """Whole messages over a socket, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE_S)

    def send(self, data: bytes) -> None:
        self.sock.sendall(SIZE.pack(len(data)) + data)

    def receive(self) -> bytes:
        return self._exactly(*SIZE.unpack(self._exactly(SIZE.size)))

    def _exactly(self, nbytes: int) -> bytes:
        parts = []
        while nbytes:
            part = self.sock.recv(min(nbytes, 1 << 20))
            if not part:
                raise EOFError("the other process is gone")
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)


# -- the child --------------------------------------------------------------------------------------


class Callback:
    """Stands for a function at the other side."""

    def __init__(self, number: int) -> None:
        self.number = number


class Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, child: Child) -> None:
        super().__init__(io.BytesIO(data))
        self.child = child

    def persistent_load(self, pid: tuple[str, Any]) -> Any:
        kind, number = pid
        if kind == "object":
            return self.child.objects[number]
        if kind == "nothing":
            return None
        return partial(self.child.call_back, number)


class Child:
    """Does what it is told to objects that it keeps."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.objects: dict[int, Any] = {}
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.devices: dict[str, Any] = {}

    def call_back(self, number: int, *arguments: Any) -> None:
        self.wire.send(pickle.dumps((None, number, arguments)))

    def readable(self) -> None:
        try:
            data = self.wire.receive()
        except (EOFError, OSError):
            os._exit(0)
        number, what, arguments = Unpickler(data, self).load()
        if what == "cancel":
            task, key = self.tasks.get(arguments[0]), arguments[1]
            if (task is None or not task.cancel()) and key in self.objects:
                self.objects.pop(key).close()  # it had come to an end, which nobody will hear of
            return
        if what in ("start", "await", "push"):
            task = self.tasks[number] = asyncio.ensure_future(getattr(self, what)(*arguments))
            task.add_done_callback(partial(self.ended, number))
            return
        try:
            result = getattr(self, what)(*arguments)
        except Exception as error:  # noqa: BLE001
            self.answer(number, error=error)
        else:
            self.answer(number, result)

    def ended(self, number: int, task: asyncio.Task[Any]) -> None:
        del self.tasks[number]
        if task.cancelled():
            self.answer(number, error=asyncio.CancelledError())
        elif task.exception() is not None:
            self.answer(number, error=task.exception())
        else:
            self.answer(number, task.result())

    def answer(self, number: int, result: Any = None, error: BaseException | None = None) -> None:
        cause = error.__cause__ if error is not None else None
        self.wire.send(pickle.dumps((number, result, (error, cause))))

    # -- what it can be told

    def put(self, key: int, thing: Any) -> None:
        self.objects[key] = thing

    def drop(self, *keys: int) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def get(self, thing: Any, name: str) -> Any:
        return getattr(thing, name)

    def do(self, key: int, thing: Any, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method; what it gives is kept under ``key``, or given back if that is 0."""
        result = getattr(thing, name)(*arguments, **named)
        return self.kept(key, result)

    def do_named(self, key: int, thing: Any, name: str, arguments: tuple[Any, ...], named: Any) -> Any:
        return self.do(key, thing, name, *arguments, **named)

    def kept(self, key: int, result: Any) -> Any:
        if not key:
            return result
        self.objects[key] = result
        return result is not None

    async def await_(self, key: int, thing: Any, name: str, *arguments: Any) -> Any:
        return self.kept(key, await getattr(thing, name)(*arguments))

    async def start(
        self, key: int, transport: str, options: dict[str, Any], device: str, layout: Any, seed: int
    ) -> Any:
        """An engine: the transport is ``key``, the cache ``key + 1``, the device ``key + 2``."""
        if device not in self.devices:
            self.devices[device] = make_device(device)
        cache = KVCache.allocate(layout, device=self.devices[device])
        bytes_ = np.random.default_rng(seed)
        for buffer in cache.buffers:
            fill(buffer, bytes_.integers(0, 256, buffer.nbytes, dtype=np.uint8))
        made = make_transport(transport, options)
        self.objects.update({key: made, key + 1: cache, key + 2: cache.device})
        await made.start(cache, "127.0.0.1")
        return made.name, made.one_sided, cache.placement

    def memory(self, cache: KVCache, number: int) -> np.ndarray:
        return contents(cache.buffers[number])

    def hold(self, key: int, seconds: float) -> None:
        """Keep a new stream of the GPU busy for so long; it is ``key``."""
        from aiokv.testing.held import Holder

        device = self.devices["cuda"]
        self.objects[key], self.objects[key + 1] = device.stream(), Holder(device, seconds=seconds)
        self.objects[key + 1].hold(self.objects[key])

    async def push(self, _: int, end: Any, part: Any, plan: Any, cache: KVCache, limit: int) -> None:
        """Send all of a part as fast as the link takes it."""
        stream, bell = cache.device.stream(), asyncio.Event()
        end.on_writable(bell.set)
        end.on_lost(bell.set)
        for layer in plan.layers:
            for chunk in plan.chunks((layer,), limit):
                while not end.writable and not end.lost:
                    bell.clear()
                    await bell.wait()
                if end.lost:
                    return
                end.send(part, plan, chunk, cache.buffers, stream=stream)


def make_device(kind: str) -> Any:
    if kind == "host":
        return HostDevice()
    import torch

    from aiokv.device.cuda import CudaDevice

    # The one that the parent doesn't use, where there are two.
    return CudaDevice(torch.cuda.device_count() - 1)


def make_transport(path: str, options: dict[str, Any]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**options)


async def main(fd: int) -> None:
    wire = Wire(socket.socket(fileno=fd))
    child = Child(wire)
    setattr(child, "await", child.await_)
    asyncio.get_running_loop().add_reader(fd, child.readable)
    await asyncio.Event().wait()


# -- the parent -------------------------------------------------------------------------------------


class Proxy:
    """An object of the other process."""

    def __init__(self, other: Other, key: int) -> None:
        self.other = other
        self.key = key
        weakref.finalize(self, other.dropped.append, key)

    def _do(self, name: str, *arguments: Any, keep: bool = False, **named: Any) -> Any:
        key = next(self.other.keys) if keep else 0
        result = self.other.ask("do_named", key, self, name, arguments, named)
        return key if keep and result else None if keep else result


class RemoteBuffer:
    def __init__(self, cache: RemoteCache, number: int, nbytes: int) -> None:
        self.cache, self.number, self.nbytes = cache, number, nbytes

    def contents(self) -> np.ndarray:
        return self.cache.other.ask("memory", self.cache, self.number)


class RemoteCache(Proxy):
    def __init__(self, other: Other, key: int, layout: Any, placement: Any) -> None:
        super().__init__(other, key)
        self.layout, self.placement = layout, placement
        self.buffers = tuple(RemoteBuffer(self, *each) for each in enumerate(placement.buffers))
        self.device = RemoteDevice(other, key + 1)

    def close(self) -> None:
        self._do("close")


class RemoteStream(Proxy):
    pass


class RemoteDevice(Proxy):
    def stream(self) -> RemoteStream:
        return RemoteStream(self.other, self._do("stream", keep=True))


class RemoteEvent(Proxy):
    def done(self) -> bool:
        return self._do("done")


class RemoteLink(Proxy):
    def __init__(self, other: Other, key: int) -> None:
        super().__init__(other, key)
        self.id = other.ask("get", self, "id")

    def _get(self, name: str) -> Any:
        return self.other.ask("get", self, name)

    @property
    def lost(self) -> bool:
        return self._get("lost")

    @property
    def writable(self) -> bool:
        return self._get("writable")

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._do("on_lost", callback)

    def on_writable(self, callback: Callable[[], None]) -> None:
        self._do("on_writable", callback)

    def read(self, plan: Any, chunk: Any, dst: Any, *, stream: Any) -> RemoteEvent:
        return RemoteEvent(self.other, self._do("read", plan, chunk, dst, keep=True, stream=stream))

    def send(self, part: Any, plan: Any, chunk: Any, src: Any, *, stream: Any) -> RemoteEvent:
        return RemoteEvent(self.other, self._do("send", part, plan, chunk, src, keep=True, stream=stream))

    def expect(self, part: Any, plan: Any, dst: Any, landed: Callable[[Chunk], None]) -> None:
        self._do("expect", part, plan, dst, landed)

    def forget(self, part: Any) -> RemoteEvent | None:
        key = self._do("forget", part, keep=True)
        return RemoteEvent(self.other, key) if key else None

    def close(self) -> None:
        self._do("close")


class RemoteTransport(Proxy):
    def __init__(self, other: Other, key: int, name: str, one_sided: bool) -> None:
        super().__init__(other, key)
        self.name, self.one_sided = name, one_sided

    def describe(self) -> bytes:
        return self._do("describe")

    def accepted(self, link: bytes) -> RemoteLink | None:
        key = self._do("accepted", link, keep=True)
        return RemoteLink(self.other, key) if key else None

    async def start(self, cache: Any, host: str) -> None:
        await self.other.ask_later("await", 0, self, "start", cache, host)

    async def connect(self, description: bytes, peer: Any) -> RemoteLink:
        key = next(self.other.keys)
        await self.other.ask_later("await", key, self, "connect", description, peer)
        return RemoteLink(self.other, key)

    async def aclose(self) -> None:
        await self.other.ask_later("await", 0, self, "aclose")


class Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, other: Other) -> None:
        super().__init__(file)
        self.other = other

    def persistent_id(self, thing: Any) -> tuple[str, int] | None:
        if isinstance(thing, Proxy):
            return "object", thing.key
        if isinstance(thing, tuple) and thing and isinstance(thing[0], RemoteBuffer):
            return "object", self.other.buffers_of(thing[0].cache)
        if isinstance(thing, BY_NUMBER):
            return "object", self.other.put(thing)
        if type(thing).__module__.startswith("aiokv.device."):
            return "nothing", 0  # of this process, and of no use there
        if callable(thing) and not isinstance(thing, type) and not thing.__module__.startswith(PICKLED):
            return "callback", self.other.callback(thing)
        return None


#: Functions of these modules are those that pickle itself refers to.
PICKLED = ("copyreg", "numpy", "builtins", "_codecs")


class Other:
    """The child process, and what is asked of it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        folder = Path(__file__).parent
        root = str(folder.parents[1])
        path = os.pathsep.join([root, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        self.wire = Wire(ours)
        self.keys = itertools.count(1, 4)
        self.numbers = itertools.count(1)
        self.answers: dict[int, tuple[Any, Any]] = {}
        self.futures: dict[int, asyncio.Future[Any]] = {}
        self.callbacks: dict[int, Callable[..., None]] = {}
        self.dropped: list[int] = []
        self.sent: dict[int, tuple[Any, int]] = {}
        self.lists: dict[int, int] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    # -- asking

    def ask(self, what: str, *arguments: Any) -> Any:
        """Ask, and wait, blocking."""
        number = self._send(what, arguments)
        while number not in self.answers:
            self._handle(self.wire.receive())
        return unpacked(self.answers.pop(number))

    async def ask_later(self, what: str, *arguments: Any) -> Any:
        """Ask, and await; what is cancelled here is cancelled there."""
        number = self._send(what, arguments)
        future = self.futures[number] = asyncio.get_running_loop().create_future()
        try:
            return unpacked(await future)
        except asyncio.CancelledError:
            self._send("cancel", (number, arguments[0]))
            raise

    def _send(self, what: str, arguments: tuple[Any, ...]) -> int:
        if self.dropped and what != "drop":
            keys, self.dropped[:] = tuple(self.dropped), []
            self.ask("drop", *keys)
        number = next(self.numbers)
        file = io.BytesIO()
        Pickler(file, self).dump((number, what, arguments))
        self.wire.send(file.getvalue())
        return number

    def _handle(self, data: bytes) -> None:
        number, result, errors = pickle.loads(data)
        if number is None:
            callback = self.callbacks.get(result)
            if callback is not None and self.loop is not None:
                self.loop.call_soon(callback, *errors)
        elif number in self.futures:
            future = self.futures.pop(number)
            if not future.done():
                future.set_result((result, errors))
        else:
            self.answers[number] = (result, errors)

    def put(self, thing: Any) -> int:
        if id(thing) not in self.sent:
            key = next(self.keys)
            number = next(self.numbers)
            self.sent[id(thing)] = thing, key
            self.wire.send(pickle.dumps((number, "put", (key, thing))))
            while number not in self.answers:
                self._handle(self.wire.receive())
            del self.answers[number]
        return self.sent[id(thing)][1]

    def buffers_of(self, cache: RemoteCache) -> int:
        if cache.key not in self.lists:
            key = self.lists[cache.key] = next(self.keys)
            self.ask("do", key, cache, "__getattribute__", "buffers")
        return self.lists[cache.key]

    def callback(self, function: Callable[..., None]) -> int:
        number = next(self.numbers)
        self.callbacks[number] = function
        return number

    # -- engines

    async def engine(
        self, transport: str, layout: Any, seed: int, device: str, options: dict[str, Any] | None = None
    ) -> Engine:
        key = next(self.keys)
        told = await self.ask_later("start", key, transport, options or {}, device, layout, seed)
        name, one_sided, placement = told
        return Engine(
            RemoteTransport(self, key, name, one_sided), RemoteCache(self, key + 1, layout, placement)
        )

    # -- life

    def attach(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.wire.sock.fileno(), self._readable)

    def _readable(self) -> None:
        # Whoever asked in this very turn may have taken it already.
        if select.select([self.wire.sock], [], [], 0)[0]:
            try:
                self._handle(self.wire.receive())
            except (EOFError, OSError):  # it was killed; who asks it hears of that
                if self.loop is not None:
                    self.loop.remove_reader(self.wire.sock.fileno())

    def detach(self) -> None:
        if self.loop is not None:
            self.loop.remove_reader(self.wire.sock.fileno())
        self.loop = None
        self.callbacks.clear()
        self.futures.clear()
        self.sent.clear()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.wire.sock.close()
        self.process.kill()
        self.process.wait()


def unpacked(answer: tuple[Any, tuple[BaseException | None, BaseException | None]]) -> Any:
    result, (error, cause) = answer
    if error is not None:
        raise error from cause
    return result


class TwoProcessesKit(TransportKit):
    """Engines in this process and the other, in turn."""

    def __init__(
        self, seed: int, other: Other, transport: str, device: Any, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(seed)
        self.other = other
        self.path, self.options = transport, options or {}
        self.device = device
        self.made = 0
        other.attach()

    def make_transport(self) -> Any:
        return make_transport(self.path, self.options)

    def make_cache(self, layout: Any) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def engine(self, layout: Any) -> Engine:
        self.made += 1
        if self.made % 2:
            return await super().engine(layout)
        seed = int(self.bytes.integers(0, 2**31))
        made = await self.other.engine(self.path, layout, seed, self.device.kind, self.options)
        self._transports.append(made.transport)
        self._caches.append(made.cache)
        return made

    async def __aexit__(self, *error: Any) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            self.other.detach()


@contextlib.asynccontextmanager
async def a_victim(
    seed: int, transport: str, device: Any, options: dict[str, Any] | None = None
) -> AsyncIterator[TwoProcessesKit]:
    """A kit whose other process is its own, and may be stopped and killed."""
    other = Other()
    kit = TwoProcessesKit(seed, other, transport, device, options)
    yield kit
    other.signal(signal.SIGCONT)
    for each in kit._transports:
        if not isinstance(each, RemoteTransport):
            await each.aclose()
    kit.poller.close()
    for cache in kit._caches:
        if isinstance(cache, KVCache):
            cache.close()
    other.detach()
    other.close()


async def lost(link: Any) -> None:
    """Wait until a link is lost."""
    bell = asyncio.Event()
    link.on_lost(bell.set)
    async with asyncio.timeout(20):
        await bell.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
