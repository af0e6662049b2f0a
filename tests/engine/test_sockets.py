"""Two engines over ZeroMQ and each data path between processes: addresses, restarts, and at rest."""

from __future__ import annotations

import asyncio
import errno
import socket

import msgspec
import numpy as np
import pytest

from aiokv.engine.choices import TRANSPORTS
from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError, LayoutMismatch, PeerLostError, Refused, TransferAborted
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, connected_pair, fill, kv_of, transfer
from aiokv.transports.memory import MemoryHub, MemoryTransport

ANY = "tcp://127.0.0.1:0"


def ipv6() -> bool:
    """Whether this machine has a loopback for IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


async def at_rest(*engines: TransferEngine) -> None:
    """Wait until nothing goes on, which sockets take their time for."""
    names = ("offers", "fetches", "parts", "parked", "leases", "in_flight")
    while any(getattr(each.statistics(), name) for each in engines for name in names):  # noqa: ASYNC110 - polled
        await asyncio.sleep(0.001)
    check_idle(*engines)


# -- data paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", [["shm"], ["tcp"], list(TRANSPORTS)], ids=["shm", "tcp", "default"])
@pytest.mark.asyncio
async def test_both_ways_at_once_pulled_and_pushed(transports: list[str]) -> None:
    async with connected_pair(transports=transports, bind=ANY) as (a, b):
        theirs = {engine.address: kv_of(engine.cache, range(8, 16)) for engine in (a, b)}
        async with asyncio.TaskGroup() as group:
            for block in range(8):
                for producer, consumer in ((a, b), (b, a)):
                    tid = f"{producer.address} {block}"
                    group.create_task(
                        transfer(
                            producer,
                            consumer,
                            tid,
                            source=[8 + block],
                            target=[block],
                            push=block % 2 > 0,
                            others=False,
                        )
                    )
        for engine in (a, b):
            assert np.array_equal(kv_of(engine.cache, range(8, 16)), theirs[engine.address])
            assert engine.statistics().sessions == 1
        await at_rest(a, b)


@pytest.mark.parametrize("transports", [["shm"], ["tcp"]], ids=["shm", "tcp"])
@pytest.mark.asyncio
async def test_layers_land_while_others_are_written_and_a_failure_is_told(transports: list[str]) -> None:
    async with connected_pair(transports=transports, bind=ANY) as (producer, consumer):
        fetch = consumer.fetch("t", [3, 4], sources=[producer.address], first_token=2)
        before = kv_of(consumer.cache, [3, 4])
        with pytest.raises(LookupError):
            async with producer.offer("t", [1, 2], tokens=7) as offer:
                fetch.start()
                for layer in (2, 0):
                    offer.layer_ready(layer)
                    await fetch.layer(layer)
                raise LookupError("no such expert")
        with pytest.raises(TransferAborted, match="LookupError: no such expert"):
            await fetch.wait()
        now, theirs = kv_of(consumer.cache, [3, 4]), kv_of(producer.cache, [1, 2])
        for layer in (2, 0):
            assert np.array_equal(now[layer, :, 2:7], theirs[layer, :, 2:7])
        for layer in (1, 3):
            assert np.array_equal(now[layer], before[layer])
        assert np.array_equal(now[:, :, :2], before[:, :, :2])
        assert np.array_equal(now[:, :, 7:], before[:, :, 7:])
        await at_rest(producer, consumer)
        await transfer(producer, consumer, "afterwards")


@pytest.mark.asyncio
async def test_a_path_that_only_one_side_has_is_passed_over() -> None:
    async with Engines() as engines:
        a = await engines.add("a", transports=["shm", "tcp"], bind=ANY)
        b = await engines.add("b", transports=[MemoryTransport(MemoryHub()), "tcp"], bind=ANY)
        c = await engines.add("c", transports=["shm"], bind=ANY)
        await transfer(a, b, "there")
        await transfer(b, a, "back")
        await transfer(a, c, "shm")
        missing = "no data path to tcp://.*: shm: not offered there; not allowed here: memory, tcp"
        with pytest.raises(Refused, match=missing):
            async with c.fetch("t", [1], sources=[b.address]):
                pass
        await at_rest(a, b, c)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_port_in_use_is_told_and_its_holder_is_not_disturbed() -> None:
    async with connected_pair(transports=["tcp"], bind=ANY) as (a, b):
        async with Engines() as others:
            cache = await others.cache(shared=True)
            second = others.make("x", cache, transports=["tcp"], bind=a.address)
            with pytest.raises(OSError, match=f"can't bind {a.address}: Address already in use") as caught:
                await second.__aenter__()
            assert caught.value.errno == errno.EADDRINUSE
            cache.close()
        await transfer(a, b, "afterwards")


@pytest.mark.asyncio
async def test_an_engine_tells_the_address_that_it_was_told_to() -> None:
    async with Engines() as engines:
        a = await engines.add("a", transports=["tcp"], bind=ANY, advertise="tcp://localhost:0")
        b = await engines.add("b", transports=["tcp"], bind=ANY)
        assert a.address.startswith("tcp://localhost:")
        assert a.address.rpartition(":")[2] not in ("", "0")
        await transfer(a, b, "pull")
        await transfer(b, a, "push", push=True)
        await at_rest(a, b)
        assert b.statistics().sessions == 1


@pytest.mark.asyncio
async def test_an_engine_is_called_by_several_names() -> None:
    async with Engines() as engines:
        a, b = [await engines.add(name, transports=["tcp"], bind=ANY) for name in "ab"]
        alias = a.address.replace("127.0.0.1", "localhost")
        going = b.fetch("going", [9], sources=[a.address])
        going.start()
        offer = a.offer("going", [9])
        offer.start()
        offer.layer_ready(0)
        await going.layer(0)
        for number, address in enumerate((alias, a.address, alias)):
            await transfer(a, b, f"t{number}", address=address, others=False)
        for layer in (1, 2, 3):
            offer.layer_ready(layer)
        await going.wait()
        await offer.wait()
        with pytest.raises(AiokvError):  # not itself under another name either
            async with a.fetch("self", [1], sources=[alias], deadline=0.2):
                pass
        await at_rest(a, b)


@pytest.mark.skipif(not ipv6(), reason="this machine has no loopback for IPv6")
@pytest.mark.asyncio
async def test_addresses_of_ipv6() -> None:
    async with Engines() as engines:
        a, b = [await engines.add(name, transports=["tcp"], bind="tcp://[::1]:0") for name in "ab"]
        assert a.address.startswith("tcp://[::1]:")
        four = await engines.add("c", transports=["tcp"], bind=ANY)
        await transfer(a, b, "pull")
        await transfer(b, a, "push", push=True)
        await transfer(a, four, "to IPv4")
        await transfer(four, a, "from IPv4")
        await at_rest(a, b, four)


@pytest.mark.asyncio
async def test_a_dead_address_is_lost_within_the_contact_time() -> None:
    async with connected_pair(transports=["tcp"], bind=ANY, settings=Settings(contact_ns=SECOND // 10)) as (
        a,
        b,
    ):
        async with Engines() as engines:
            gone = await engines.add("gone", transports=["tcp"], bind=ANY)
        for address in (gone.address, "tcp://no-such-host.invalid:9"):
            with pytest.raises(PeerLostError, match=r"no answer from tcp://.* within 0\.1 s"):
                async with a.fetch("t", [1], sources=[address], attempt=len(address)):
                    pass
        await at_rest(a, b)
        await transfer(a, b, "afterwards")


@pytest.mark.asyncio
async def test_an_address_is_used_again_by_the_same_and_by_another_layout() -> None:
    other = msgspec.structs.replace(LAYOUT, model=b"another")
    async with Engines() as engines:
        consumer = await engines.add("c", transports=["shm", "tcp"], bind=ANY)
        bind = ANY
        for number, layout in enumerate((LAYOUT, LAYOUT, other, LAYOUT)):
            producer = await engines.add("p", layout, transports=["shm", "tcp"], bind=bind)
            bind = producer.address
            fill(producer.cache, seed=number)
            if layout is LAYOUT:
                await transfer(producer, consumer, f"t{number}")
            else:
                with pytest.raises(LayoutMismatch, match="model fingerprint"):
                    async with consumer.fetch("t", [1], sources=[producer.address]):
                        pass
            await at_rest(producer, consumer)
            await engines.close(producer)
        assert consumer.statistics().sessions == 0


# -- at rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", [["shm"], ["tcp"]], ids=["shm", "tcp"])
@pytest.mark.asyncio
async def test_an_idle_engine_has_no_turns(transports: list[str]) -> None:
    async with connected_pair(transports=transports, bind=ANY) as (a, b):
        await asyncio.sleep(0.02)  # the last words arrive
        before = a.statistics(), b.statistics()
        for _ in range(200):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert (a.statistics(), b.statistics()) == before
