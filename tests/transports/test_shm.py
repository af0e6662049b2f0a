from __future__ import annotations

import fcntl
import os
import secrets

import msgspec
import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.transports import local
from aiokv.transports.base import Transport
from aiokv.transports.local import Offer
from aiokv.transports.shm import ShmTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=4, block_size=4, heads=2, head_size=8, dtype="float16")


class ShmKit(TransportKit):
    def make_transport(self) -> Transport:
        return ShmTransport()


@pytest.mark.asyncio
async def test_a_cache_without_descriptors_is_not_served() -> None:
    cache = KVCache.from_tensors(LAYOUT, [torch.zeros(2, 4, 4, 2, 8, dtype=torch.float16) for _ in range(2)])
    transport = ShmTransport()
    with pytest.raises(DeviceError, match=r"from_tensors"):
        await transport.start(cache, "")
    await transport.aclose()
    cache.close()


@pytest.mark.asyncio
async def test_another_host_is_told_from_this_one(seed: int) -> None:
    async with ShmKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        boot, door, token = msgspec.msgpack.decode(producer.transport.describe())
        elsewhere = msgspec.msgpack.encode(["0" * len(boot), door, token])
        with pytest.raises(PeerLostError, match="another host"):
            await consumer.transport.connect(elsewhere, producer.info)
        nobody = msgspec.msgpack.encode([boot, "0" * 32, token])
        with pytest.raises(PeerLostError, match="nobody"):
            await consumer.transport.connect(nobody, producer.info)
        long = msgspec.msgpack.encode([boot, "0" * 1000, token])
        with pytest.raises(PeerLostError, match="nobody"):
            await consumer.transport.connect(long, producer.info)


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


BAD = {
    "cut short": (lambda nbytes: memfd(nbytes, 0), "cut short"),
    "too small": (lambda nbytes: memfd(nbytes - 4096, fcntl.F_SEAL_SHRINK), "instead of"),
    "no file": (lambda nbytes: a_pipe(), "can't be mapped"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("what", BAD)
async def test_descriptors_are_looked_at_before_they_are_mapped(what: str, seed: int) -> None:
    make, match = BAD[what]

    class Liar(ShmTransport):
        def _offer(self, cache: KVCache) -> Offer:
            offer = super()._offer(cache)
            return Offer(offer.extra, (offer.fds[0], fd))

    async with ShmKit(seed) as kit:
        consumer = await kit.engine(LAYOUT)
        fd = make(consumer.cache.buffers[0].nbytes)
        kit.make_transport = Liar
        producer = await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError, match=match):
            await consumer.transport.connect(producer.transport.describe(), producer.info)
    os.close(fd)


@pytest.mark.asyncio
async def test_a_path_that_shows_another_nonce_is_not_used(seed: int) -> None:
    class Liar(ShmTransport):
        def _offer(self, cache: KVCache) -> Offer:
            return Offer(secrets.token_bytes(32), super()._offer(cache).fds)

    async with ShmKit(seed) as kit:
        consumer = await kit.engine(LAYOUT)
        kit.make_transport = Liar
        producer = await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError, match="what it wrote"):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_what_start_took_is_given_back_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(local, "_address", lambda door: b"/nowhere/at/all")
    async with ShmKit(seed) as kit:
        with pytest.raises(DeviceError, match="can't listen"):
            await kit.engine(LAYOUT)


@pytest.mark.asyncio
async def test_what_a_consumer_says_ends_the_link(seed: int) -> None:
    async with ShmKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        path = await consumer.read_from(producer)
        path.end._sock.send(b"?")
        assert not path.producer_end.alive()
        assert path.producer_end.lost
        assert not path.end.alive()
