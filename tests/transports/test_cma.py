from __future__ import annotations

import asyncio
import errno
import os
import sys

import msgspec
import numpy as np
import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.transports import cma
from aiokv.transports.base import Transport
from aiokv.transports.cma import CmaTransport
from aiokv.transports.local import Offer
from aiokv.transports.vectors import VectorIO

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16")


class TensorKit(TransportKit):
    """Caches of tensors that somebody else allocated: one buffer for each layer."""

    def make_transport(self) -> Transport:
        return CmaTransport()

    def make_cache(self, layout: CacheLayout) -> KVCache:
        (group,) = layout.groups
        tensors = [torch.zeros(group.shape, dtype=getattr(torch, group.dtype)) for _ in group.layers]
        return KVCache.from_tensors(layout, tensors)


class Refusing(VectorIO):
    """A kernel that answers every read in one way."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def read_process(self, pid, into, out, lengths):
        raise OSError(self.number, os.strerror(self.number))


class Halting(VectorIO):
    """A kernel that moves a few bytes a call, as it does where memory is paged out or ends."""

    def read_process(self, pid, into, out, lengths):
        cut = np.minimum(lengths[:2], 7)
        return super().read_process(pid, into, out, cut[: 1 + (cut[0] == lengths[0])])


@pytest.mark.asyncio
async def test_reads_tensors_in_several_buffers_also_in_small_steps(seed: int) -> None:
    async with TensorKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        path.end._process._io = Halting()
        part = path.part(kit, 1)
        expected = path.consumer.copy_of_memory()
        part.apply(path.producer.copy_of_memory(), expected)
        for chunk in part.chunks(300):
            await part.move(kit, chunk)
        for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
@pytest.mark.parametrize(("number", "match"), [(errno.EPERM, "ptrace_scope"), (errno.ESRCH, "can't be read")])
async def test_a_refusal_shows_on_connecting(number: int, match: str, seed: int) -> None:
    async with TensorKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        consumer.transport._io = Refusing(number)
        with pytest.raises(PeerLostError, match=match):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_a_read_that_fails(seed: int) -> None:
    async with TensorKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        path.end._process._io = Refusing(errno.EFAULT)
        part = path.part(kit, 1)
        with pytest.raises(DeviceError, match="can't be read"):
            await part.move(kit, part.chunks(300)[0])
        assert not path.end.lost


@pytest.mark.asyncio
async def test_a_process_that_ended_is_lost_also_where_only_its_memory_tells(seed: int) -> None:
    async with TensorKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        path.end._process._io = Refusing(errno.ESRCH)
        part = path.part(kit, 1)
        with pytest.raises(PeerLostError, match="ended"):
            await part.move(kit, next(iter(part.chunks(300))))
        assert path.end.lost


@pytest.mark.asyncio
async def test_another_process_at_the_other_end_is_found_out(seed: int) -> None:
    """Its socket is there (a child inherited it), but the process that it was has ended."""
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=-1)
    async with TensorKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        part = path.part(kit, 1)
        fd = os.pidfd_open(ended.pid)
        ended.kill()
        await ended.wait()
        path.end._poll.register(fd)
        with pytest.raises(PeerLostError, match="has ended"):
            await part.move(kit, part.chunks(300)[0])
        assert path.end.lost
        os.close(fd)


@pytest.mark.asyncio
@pytest.mark.parametrize("lie", ["nonce", "address", "garbage"])
async def test_what_a_producer_says_of_its_memory_is_checked(lie: str, seed: int) -> None:
    class Liar(CmaTransport):
        def _offer(self, cache: KVCache) -> Offer:
            nonce, at, buffers = msgspec.msgpack.decode(super()._offer(cache).extra)
            if lie == "nonce":
                nonce = bytes(32)
            if lie == "address":
                at = 4096
            return Offer(b"\xc1" if lie == "garbage" else msgspec.msgpack.encode([nonce, at, buffers]))

    async with TensorKit(seed) as kit:
        consumer = await kit.engine(LAYOUT)
        kit.make_transport = Liar
        producer = await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_a_process_of_another_namespace_is_refused(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    class Elsewhere:
        size = cma._CREDENTIALS.size

        def unpack(self, data: bytes) -> tuple[int, int, int]:
            return 0, 65534, 65534

    monkeypatch.setattr(cma, "_CREDENTIALS", Elsewhere())
    async with TensorKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError, match="namespace"):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_memory_of_a_device_is_not_served(seed: int) -> None:
    cache = KVCache.allocate(LAYOUT, device=MockedDevice(seed))
    transport = CmaTransport()
    with pytest.raises(DeviceError, match="mocked"):
        await transport.start(cache, "")
    await transport.aclose()
