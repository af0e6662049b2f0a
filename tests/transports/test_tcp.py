from __future__ import annotations

import asyncio
import socket

import msgspec
import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import Chunk
from aiokv.testing.conformance.transportkit import PATIENCE_S, Path, TransportKit, bytes_of
from aiokv.transports import arriving, inlet
from aiokv.transports.base import PeerInfo, Transport
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.tcp import TcpTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=64, block_size=16, heads=8, head_size=64, dtype="float16")


class TcpKit(TransportKit):
    def make_transport(self) -> Transport:
        return TcpTransport()


async def a_path(kit: TransportKit) -> Path:
    return await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))


async def lost(path: Path) -> None:
    bell = asyncio.Event()
    path.end.on_lost(bell.set)
    async with asyncio.timeout(PATIENCE_S):
        await bell.wait()


# -- addresses


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("::1", None, "::1"),
        ("localhost", None, None),
        ("0.0.0.0", None, ""),
        ("::", None, ""),
        ("0.0.0.0", "localhost", "localhost"),
    ],
)
async def test_consumers_are_told_where_to_dial(
    host: str, advertise: str | None, told: str | None, seed: int
) -> None:
    async with TcpKit(seed) as kit:
        consumer = await kit.engine(LAYOUT)
        producer = TcpTransport(advertise=advertise)
        await producer.start(consumer.cache, host)
        if told is not None:
            assert msgspec.msgpack.decode(producer.describe())[0] == told
        info = PeerInfo("tcp://127.0.0.1:5555", b"i" * 16, consumer.cache.placement)
        (await consumer.transport.connect(producer.describe(), info)).close()
        await producer.aclose()


@pytest.mark.asyncio
async def test_addresses_that_lead_nowhere(seed: int) -> None:
    async with TcpKit(seed) as kit:
        engine = await kit.engine(LAYOUT)
        _, port, token = msgspec.msgpack.decode(engine.transport.describe())
        for host, where, address in [
            ("", port, "memory"),
            ("127.0.0.1", 0, "tcp://127.0.0.1:1"),
            ("127.0.0.1", 70000, "tcp://127.0.0.1:1"),
            ("\0", port, "tcp://127.0.0.1:1"),
            ("127.0.0.1", 1, "tcp://127.0.0.1:1"),
        ]:
            info = PeerInfo(address, b"i" * 16, engine.cache.placement)
            with pytest.raises(PeerLostError):
                await engine.transport.connect(msgspec.msgpack.encode([host, where, token]), info)


@pytest.mark.asyncio
async def test_a_port_that_is_taken(seed: int) -> None:
    async with TcpKit(seed) as kit:
        engine = await kit.engine(LAYOUT)
        _, port, _ = msgspec.msgpack.decode(engine.transport.describe())
        other = TcpTransport([port])
        with pytest.raises(DeviceError, match=str(port)):
            await other.start(engine.cache, "127.0.0.1")
        await other.aclose()


@pytest.mark.asyncio
async def test_of_several_ports_the_first_that_can_be_had(seed: int) -> None:
    async with TcpKit(seed) as kit:
        engine = await kit.engine(LAYOUT)
        _, taken, _ = msgspec.msgpack.decode(engine.transport.describe())
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            free = sock.getsockname()[1]
        other = TcpTransport([taken, free])
        await other.start(engine.cache, "127.0.0.1")
        assert msgspec.msgpack.decode(other.describe())[1] == free
        await other.aclose()


@pytest.mark.asyncio
async def test_memory_of_a_device_is_not_served(seed: int) -> None:
    transport = TcpTransport()
    with pytest.raises(DeviceError, match="mocked"):
        await transport.start(KVCache.allocate(LAYOUT, device=MockedDevice(seed)), "127.0.0.1")
    await transport.aclose()


# -- the sender


@pytest.mark.asyncio
async def test_memory_may_be_written_as_soon_as_the_event_is_done(seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part = path.part(kit, 1, tokens=1000)
        part.expect()
        expected = path.consumer.copy_of_memory()
        part.apply(path.producer.copy_of_memory(), expected)
        for chunk in part.chunks(1 << 19):
            await part.move(kit, chunk)
        for buffer in path.producer.cache.buffers:
            bytes_of(buffer)[:] = 0
        await part.until(part.plan.total)
        np.testing.assert_array_equal(path.consumer.copy_of_memory()[0], expected[0])


@pytest.mark.asyncio
async def test_says_when_to_send_more(seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part = path.part(kit, 1, tokens=1000)
        part.expect()
        for sock in path.end._socks:
            path.end._loop.remove_reader(sock.fileno())  # a consumer that doesn't read
        end, buffers = path.producer_end, path.producer.cache.buffers
        stream_ = path.producer.cache.device.stream()
        told = asyncio.Event()
        end.on_writable(told.set)
        events, chunks = [], part.chunks(1 << 20) * 100
        while end.writable:
            chunk = chunks.pop()
            events.append(end.send(part.id, part.plan, chunk, buffers, stream=stream_))
        assert not events[-1].done()
        assert not told.is_set()
        end.close()
        assert not end.writable
        with pytest.raises(DeviceError):
            events[-1].done()
        with pytest.raises(PeerLostError):
            end.send(part.id, part.plan, part.chunks(1 << 20)[0], buffers, stream=stream_)


@pytest.mark.asyncio
async def test_a_consumer_that_talks_is_cut(seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        path.end._socks[0].send(b"?")
        await lost(path)
        assert path.producer_end.lost


# -- the receiver


def part_and_frame(path: Path, kit: TransportKit, **changes: int):
    part = path.part(kit, 1)
    chunk = part.chunks(1 << 12)[0]._replace(**changes)
    return part, chunk, pack(tag_of(part.id), chunk)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 2},
        {"copy": 9},
        {"lo": 2**63},
        {"hi": 2**64 - 1},
        {"hi": 0},
        {"nbytes": 1},
        {"nbytes": 2**63},
    ],
    ids=repr,
)
async def test_chunks_that_are_not_in_the_plan_cut_the_link(changes: dict[str, int], seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        before = path.consumer.copy_of_memory()
        part, _, header = part_and_frame(path, kit, **changes)
        part.expect()
        path.producer_end._socks[0].send(header + b"x" * 1000)
        await lost(path)
        assert part.arrived == 0
        np.testing.assert_array_equal(path.consumer.copy_of_memory()[0], before[0])


@pytest.mark.asyncio
async def test_a_forgotten_part_is_drained_whatever_its_length(seed: int) -> None:
    """Its plan is gone, so the length that a header tells can't be checked, nor may it cost memory."""
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part, chunk, _ = part_and_frame(path, kit)
        part.expect()
        path.end.forget(part.id)
        loop = asyncio.get_running_loop()
        for nbytes in (0, 1, inlet._SCRATCH, 16 * inlet._SCRATCH, 40 * inlet._SCRATCH + 1):
            header = pack(tag_of(part.id), Chunk(9, 9, 9, 9, 9, nbytes))
            await loop.sock_sendall(path.producer_end._socks[0], header + bytes(nbytes))
        other = path.part(kit, 2)
        other.expect()
        await other.move(kit, chunk)
        await other.until(chunk.nbytes)
        assert part.arrived == 0
        await loop.sock_sendall(
            path.producer_end._socks[0], pack(tag_of(part.id), Chunk(0, 1, 0, 0, 1, 2**64 - 1))
        )
        await loop.sock_sendall(path.producer_end._socks[0], bytes(1 << 20))
        assert not path.end.lost


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 51, 52, 53, 1000])
async def test_bytes_may_come_in_any_portions(size: int, seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part, chunk, header = part_and_frame(path, kit)
        part.expect()
        frames = header + bytes(range(256)) * (chunk.nbytes // 256)
        again = chunk._replace(layer=1)
        frames += pack(tag_of(part.id), again) + bytes(again.nbytes)
        for at in range(0, len(frames), size):
            path.producer_end._socks[0].send(frames[at : at + size])
            path.end._inlets[0]._readable()
        await part.until(2 * chunk.nbytes)
        assert part.landed == {0: chunk.nbytes, 1: chunk.nbytes}


@pytest.mark.asyncio
@pytest.mark.parametrize("given_up", [False, True])
async def test_a_large_frame_may_trickle(given_up: bool, seed: int) -> None:
    """The kernel gathers bytes before it wakes the loop, but never more than the frame still has."""
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part, other = path.part(kit, 1, tokens=900), path.part(kit, 2)
        part.expect()
        other.expect()
        chunk = part.chunks(2 << 20)[0]
        assert chunk.nbytes > inlet._WORTH_WAKING
        loop, sock = asyncio.get_running_loop(), path.producer_end._socks[0]
        await loop.sock_sendall(sock, pack(tag_of(part.id), chunk))
        for at in range(0, chunk.nbytes, 100_000):
            await loop.sock_sendall(sock, bytes(min(100_000, chunk.nbytes - at)))
            if given_up and at == 500_000:
                path.end.forget(part.id)
            await asyncio.sleep(0)
        await other.move(kit, other.chunks(2 << 20)[0])
        await other.until(1)
        assert part.arrived == (0 if given_up else chunk.nbytes)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["forget", "close", "fail"])
async def test_what_is_called_back_may_call(what: str, seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        part = path.part(kit, 1, tokens=200)
        told = asyncio.Event()
        heard: list[int] = []

        def landed(chunk: Chunk) -> None:
            told.set()
            heard.append(chunk.nbytes)
            if what == "forget":
                path.end.forget(part.id)
            elif what == "close":
                path.end.close()
            else:
                raise ZeroDivisionError

        errors: list[object] = []
        if what == "fail":
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        path.end.expect(part.id, part.plan, path.consumer.cache.buffers, landed)
        stream_, buffers = path.producer.cache.device.stream(), path.producer.cache.buffers
        chunks = part.chunks(1 << 14)
        for chunk in chunks:
            path.producer_end.send(part.id, part.plan, chunk, buffers, stream=stream_)
        await told.wait()
        if what == "close":
            await lost(path)
            assert len(heard) == 1
        elif what == "forget":
            other = path.part(kit, 2)
            other.expect()
            await other.move(kit, other.chunks(1 << 14)[0])
            await other.until(1)
            assert len(heard) == 1
        else:
            while len(heard) < len(chunks):
                told.clear()
                await told.wait()
            assert len(errors) == len(chunks)


@pytest.mark.asyncio
async def test_only_so_many_forgotten_parts_are_remembered(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(arriving, "_FORGOTTEN", 3)
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        for number in range(10):
            path.end.forget((f"part-{number}", 1))
        assert len(path.end._parts.forgotten) == 3
        _, chunk, header = part_and_frame(path, kit)
        path.producer_end._socks[0].send(pack(tag_of(("part-9", 1)), chunk) + bytes(chunk.nbytes) + header)
        await lost(path)  # for the last frame, whose part was forgotten too long ago


@pytest.mark.asyncio
async def test_connections_are_not_delayed(seed: int) -> None:
    async with TcpKit(seed) as kit:
        path = await a_path(kit)
        for end in (path.end, path.producer_end):
            for sock in end._socks:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
