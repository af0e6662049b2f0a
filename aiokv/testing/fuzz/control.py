"""Nonsense for the control port of a live engine, beside a good peer that goes on with its transfers.

The engine listens on a real socket. Intruders send what they like to it, and one peer is an engine like any
other but that its frames are changed, lost and doubled on their way out, so that also transfers in progress
hear nonsense. The good peer transfers all the while, and its bytes are compared. In the end nothing may have
happened to it, nothing may be left, and nothing may have grown without bound.

What the channel has to keep out is left out: who knows a good peer's incarnation can speak for it, and who
says that he lives at its address takes its place. That is what keys are for.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import resource
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiokv.control.base import Port
from aiokv.control.zmq import ZmqChannel, ZmqPort
from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError
from aiokv.proto.messages import encode_message
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.fuzz.intruders import Intruders, Known
from aiokv.testing.fuzz.mutation import Mutator
from aiokv.testing.fuzz.recording import genuine_frames
from aiokv.testing.pairs import fill, kv_of, transfer
from aiokv.testing.tables import LAYOUT

__all__ = ["fuzz"]

#: Peers that the engine under attack may have, fewer than the intruders' addresses.
_PEERS = 24
_PARKED = 64
_ADDRESSES = 1000
#: Cases between two transfers of the good peer.
_BATCH = 40
#: Cases between two transfers of the peer whose frames are changed, and how long those may take (s).
_BETWEEN, _DEADLINE_S = 100, 0.5
#: Of a hundred of its frames, how many are changed.
_SPOILT = 10
#: After this time somebody hangs (s).
_PATIENCE_S = 30.0
#: What the process may grow by after the first third of the cases (bytes).
_GROWTH = 48 << 20
#: Blocks of the engine that the good peer uses, the bad one uses, and nobody uses.
_GOOD, _BAD, _NOBODY = ([0, 1], [2, 3]), ([4, 5], [6, 7]), range(8, 16)

_SETTINGS = Settings(
    contact_ns=SECOND // 2,
    heartbeat_ns=SECOND // 10,
    lease_ns=SECOND // 2,
    drain_ns=SECOND,
    peers=_PEERS,
    parked_per_peer=_PARKED,
    close_ns=1,
    tombstones=1000,
)
_TRANSPORTS = ["shm", "tcp"]


def fuzz(cases: int, seed: int) -> Counter[str]:
    """Play so many cases.

    Args:
        cases: How many.
        seed: Draws them; when each arrives is the machine's business.

    Returns:
        How many there were of each kind, and what went on beside them.

    Raises:
        AssertionError: Somebody was disturbed, or something is left.
    """
    frames = genuine_frames()
    caches = [KVCache.allocate(LAYOUT) for _ in range(3)]
    for number, cache in enumerate(caches):
        fill(cache, number)
    try:
        return asyncio.run(_fuzz(cases, seed, frames, caches))
    except (AiokvError, ExceptionGroup, TimeoutError) as error:
        raise AssertionError(f"seed {seed}: a good peer was disturbed: {error!r}") from error
    finally:
        for cache in caches:
            cache.close()


async def _fuzz(cases: int, seed: int, frames: list[bytes], caches: list[KVCache]) -> Counter[str]:
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(_told(context)))
    chance = random.Random(seed)  # noqa: S311
    descriptors = _descriptors()
    async with _stage(chance, caches) as stage:
        stage.meet(frames)
        await stage.play(cases)
        counts = await stage.end(seed)
    await asyncio.sleep(0)
    _check(seed, not errors, f"{len(errors)} errors came to the loop's handler, first {errors[:1]}")
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    _check(seed, not left, f"tasks are left: {left[:3]}")
    _check(seed, _descriptors() <= descriptors + 1, "descriptors are left")
    return counts


def _told(context: dict[str, Any]) -> str:
    return f"{context['message']}: {context.get('exception')!r}"


def _check(seed: int, holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(f"seed {seed}: {text}")


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -- channels --------------------------------------------------------------------------------------


class _Fenced(ZmqChannel):
    """Really opens ports to those that belong here alone; whoever else is named is nobody's listener."""

    def __init__(self, nowhere: str) -> None:
        super().__init__("tcp://127.0.0.1:0")
        self.known: set[str] = set()
        self._nowhere = nowhere

    def open(self, address: str) -> ZmqPort:
        if address in self.known:
            return super().open(address)
        super().open(address).close()  # raises where the address is none
        return super().open(self._nowhere)

    @property
    def ports(self) -> int:
        """Ports that are open."""
        return len(self._ports)


class _SpoilingPort:
    """Changes, loses and doubles some of what it is to send."""

    def __init__(self, port: Port, mutator: Mutator) -> None:
        self._port = port
        self._mutator = mutator

    def send(self, frame: bytes) -> None:
        pick = self._mutator.chance.randrange(100)
        if pick >= _SPOILT:
            self._port.send(frame)
        elif pick == 0:
            self._port.send(frame)
            self._port.send(frame)
        elif pick > 1:
            self._port.send(self._mutator.change_body(frame))

    def close(self) -> None:
        self._port.close()


class _SpoilingChannel:
    """A channel whose ports spoil what is sent."""

    def __init__(self, mutator: Mutator) -> None:
        self._channel = ZmqChannel("tcp://127.0.0.1:0")
        self._mutator = mutator
        self.sender = ""  # there are no keys

    async def start(self, receive: Callable[[bytes], None]) -> str:
        return await self._channel.start(receive)

    def open(self, address: str) -> _SpoilingPort:
        return _SpoilingPort(self._channel.open(address), self._mutator)

    async def aclose(self) -> None:
        await self._channel.aclose()


# -- the run ---------------------------------------------------------------------------------------


@asynccontextmanager
async def _stage(chance: random.Random, caches: list[KVCache]) -> AsyncIterator[_Stage]:
    """The engine, its good peer, its bad peer, and a place where nobody answers."""
    nobody = socket.create_server(("127.0.0.1", 0))
    with nobody:
        channel = _Fenced(f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        spoiling = _SpoilingChannel(Mutator(random.Random(chance.random())))  # noqa: S311
        engines = [
            TransferEngine(cache, channel=each, transports=_TRANSPORTS, settings=_SETTINGS)
            for cache, each in zip(caches, (channel, None, spoiling), strict=True)
        ]
        async with engines[0] as engine, engines[1] as good, engines[2] as bad:
            channel.known |= {good.address, bad.address}
            stage = _Stage(chance, channel, engine, good, bad)
            try:
                yield stage
            finally:
                stage.close()


class _Stage:
    """One run: who takes part, and what is looked at."""

    def __init__(
        self,
        chance: random.Random,
        channel: _Fenced,
        engine: TransferEngine,
        good: TransferEngine,
        bad: TransferEngine,
    ) -> None:
        self._chance = chance
        self._channel = channel
        self._engine, self._good, self._bad = engine, good, bad
        self._intruders: Intruders | None = None
        self._spoilt: set[asyncio.Task[str]] = set()
        self._counts: Counter[str] = Counter()
        self._untouched = self._digest()
        self._most_ports = 0

    def meet(self, frames: list[bytes]) -> None:
        """Let intruders come."""
        core = self._bad._core
        assert core is not None
        assert self._engine._core is not None
        known = Known(
            endpoint=self._engine.address,
            incarnation=self._engine._core.peers._me.incarnation,
            hello=encode_message(core.peers._me.hello),
        )
        addresses = [
            f"tcp://127.0.0.1:{port}" for port in self._chance.sample(range(1025, 65_000), _ADDRESSES)
        ]
        self._intruders = Intruders(self._chance, frames, known, addresses)

    def close(self) -> None:
        """Send the intruders away."""
        if self._intruders is not None:
            self._intruders.close()
            self._intruders = None

    async def play(self, cases: int) -> None:
        """Play all cases; what the good peer does in between has to go well."""
        assert self._intruders is not None
        await self._transfer()
        grown_from = 0
        for number in range(cases):
            self._intruders.strike()
            if number % _BETWEEN == 0 and not self._spoilt:
                self._begin_spoilt()
            if number % _BATCH == 0:
                await self._transfer()
            if number == cases // 3:
                grown_from = _resident()
        await self._transfer()
        grown = _resident() - grown_from
        assert grown < _GROWTH, f"the process grew by {grown} bytes"
        self._counts += self._intruders.counts

    async def _transfer(self) -> None:
        """One of the good peer's, either way. Ids can't be guessed, or a stranger could ask for them."""
        tid, (here, there) = uuid.uuid4().hex, _GOOD
        pair = self._engine, self._good
        if self._chance.random() < 0.5:
            pair, (here, there) = pair[::-1], (there, here)
        async with asyncio.timeout(_PATIENCE_S):
            push = self._chance.random() < 0.5
            await transfer(*pair, tid, source=here, target=there, push=push, others=False)
        self._counts["good transfers"] += 1
        self._look()

    def _look(self) -> None:
        """Whatever is sent, what is kept has its bounds."""
        found = self._engine.statistics()
        assert found.parked <= _PARKED * _PEERS, f"{found.parked} requests are parked"
        # A life of a peer may have eight sessions, each with a port.
        assert found.sessions <= 8 * _PEERS, f"there are {found.sessions} sessions"
        self._most_ports = max(self._most_ports, self._channel.ports)
        assert self._channel.ports <= 8 * _PEERS + 2, f"there are {self._channel.ports} ports"

    def _begin_spoilt(self) -> None:
        pair = (self._engine, self._bad) if self._chance.random() < 0.5 else (self._bad, self._engine)
        task = asyncio.get_running_loop().create_task(self._spoilt_transfer(*pair))
        self._spoilt.add(task)
        task.add_done_callback(self._spoilt_ended)

    def _spoilt_ended(self, task: asyncio.Task[str]) -> None:
        self._spoilt.discard(task)
        self._counts[f"spoilt transfers: {task.result()}"] += 1

    async def _spoilt_transfer(self, producer: TransferEngine, consumer: TransferEngine) -> str:
        """One whose messages are changed: it may end as it likes, but it has to end."""
        tid, (source, target) = uuid.uuid4().hex, _BAD
        push = self._chance.random() < 0.5
        async with asyncio.timeout(_PATIENCE_S):
            try:
                offer = producer.offer(
                    tid, source, to=[consumer.address] if push else [], deadline=_DEADLINE_S
                )
                named = None if push else [producer.address]
                fetch = consumer.fetch(tid, target, sources=named, deadline=_DEADLINE_S)
                async with fetch, offer:  # leaving the offer announces its layers
                    pass
            except AiokvError as error:
                return type(error).__name__
        return "went well"

    async def end(self, seed: int) -> Counter[str]:
        """Look what became of everybody, once the intruders are gone."""
        self.close()
        if self._spoilt:
            await asyncio.wait(self._spoilt)
        await self._transfer()
        found, good = self._engine.statistics(), self._good.statistics()
        self._counts["stray frames"] = found.frames_stray
        self._counts["ports at most"] = self._most_ports
        _check(seed, good.sessions_lost == 0, "the good peer lost its session")
        _check(seed, found.frames_stray > 0, "no stray frames were counted")
        for name in ("offers", "fetches", "parts", "leases", "blocks_held", "quarantined", "in_flight"):
            _check(seed, getattr(found, name) == 0, f"{name} is {getattr(found, name)}")
        _check(seed, self._digest() == self._untouched, "blocks that nobody wrote have changed")
        return self._counts

    def _digest(self) -> str:
        return hashlib.sha256(kv_of(self._engine.cache, _NOBODY).tobytes()).hexdigest()
