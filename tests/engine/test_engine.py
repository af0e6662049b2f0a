"""An engine's life: what it is opened with, what an open one costs, and how it is closed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import msgspec
import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.errors import ClosedError, DeviceError, PeerLostError, TransferAborted
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.faultynetwork import FaultyNetwork
from aiokv.testing.pairs import Engines, check_idle, connected_pair, settle, transfer, virtual_time
from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.memory import MemoryHub, MemoryTransport

# -- opening ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_it_has_an_address_once_it_is_open() -> None:
    async with Engines() as engines:
        engine = engines.make("a", await engines.cache())
        assert engine.address == ""
        await engines.enter(engine)
        assert engine.address == "memory://a"


@pytest.mark.asyncio
async def test_before_it_is_entered_it_can_do_nothing() -> None:
    engines = Engines()
    engine = engines.make("a", await engines.cache())
    for use in (lambda: engine.offer("t", [1]), lambda: engine.fetch("t", [1]), engine.statistics):
        with pytest.raises(ClosedError, match="new|not entered yet"):
            use()
    await engine.aclose()  # which does nothing
    async with engine:
        assert engine.statistics().turns == 0


@pytest.mark.asyncio
async def test_it_can_be_entered_once() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        with pytest.raises(ClosedError, match="entered once; this one is open"):
            await a.__aenter__()
        await transfer(a, await engines.add("b"), "still open")
        await a.aclose()
        with pytest.raises(ClosedError, match="this one is closed"):
            await a.__aenter__()


@pytest.mark.parametrize(
    ("size", "message"), [(4097, "can't be sent: Expected `bytes` of length"), (4096, "")]
)
@pytest.mark.asyncio
async def test_what_no_peer_could_read_fails_at_the_start(size: int, message: str) -> None:
    class Talkative(MemoryTransport):
        def describe(self) -> bytes:
            return bytes(size)

    async with Engines() as engines:
        engine = engines.make("a", await engines.cache(), transports=[Talkative(engines.hub)])
        if message:
            with pytest.raises(ValueError, match=message):
                await engines.enter(engine)
        else:
            await engines.enter(engine)


@pytest.mark.asyncio
async def test_a_cache_of_more_buffers_than_a_message_can_name_fails_at_the_start() -> None:
    async with Engines() as engines:
        held = await engines.cache()
        places = (*held.placement.buffers, *[2**62] * 120_000)
        crowded = msgspec.structs.replace(held.placement, buffers=places)
        cache = KVCache(held.layout, crowded, held.device, held.buffers)
        with pytest.raises(ValueError, match=r"takes 1\d+ bytes of 1048576"):
            await engines.enter(engines.make("a", cache))


@pytest.mark.asyncio
async def test_a_port_in_use_is_an_error_and_leaves_nothing_open() -> None:
    async with Engines() as engines:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            cache = await engines.cache(shared=True)
            engine = engines.make("a", cache, transports=["shm", "tcp"], bind=bind)
            with pytest.raises(OSError, match="in use") as caught:
                await engine.__aenter__()
            assert caught.value.errno == errno.EADDRINUSE
            with pytest.raises(ClosedError):
                engine.offer("t", [1])
        # The cache serves another engine, which takes the port that is free now.
        again = await engines.add("a", cache=cache, transports=["shm", "tcp"], bind=bind)
        assert again.address == bind
        await transfer(again, await engines.add("b", transports=["shm"], bind="tcp://127.0.0.1:0"), "t")


@pytest.mark.asyncio
async def test_an_address_in_use_disturbs_nobody_who_has_it() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        other = engines.make("a", await engines.cache())
        with pytest.raises(OSError, match="in use"):
            await other.__aenter__()
        await transfer(a, b, "t")
        check_idle(a, b)


@pytest.mark.asyncio
async def test_without_memory_to_share_the_other_transports_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engines() as engines:
        cache = await engines.cache(shared=True)

        def no_memory(name: str, flags: int = 0) -> int:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", no_memory)
            only = engines.make("only", cache, transports=["shm"])
            with pytest.raises(
                DeviceError, match="no transport can serve this cache: shm: .*Cannot allocate"
            ):
                await only.__aenter__()
            a = await engines.add("a", cache=cache, transports=["shm", "tcp"], bind="tcp://127.0.0.1:0")
        b = await engines.add("b", transports=["shm", "tcp"], bind="tcp://127.0.0.1:0")
        await transfer(a, b, "by tcp")
        assert a.statistics().bytes_sent > 0
        await transfer(b, a, "by tcp, too")


@pytest.mark.asyncio
async def test_what_it_is_told_to_advertise_is_its_address() -> None:
    async with Engines() as engines:
        a = await engines.add(
            "a", transports=["shm"], bind="tcp://0.0.0.0:0", advertise="tcp://127.0.0.1", insecure=True
        )
        assert a.address.startswith("tcp://127.0.0.1:")
        assert not a.address.endswith(":0")
        b = await engines.add("b", transports=["shm"], bind="tcp://127.0.0.1:0")
        await transfer(a, b, "there")
        await transfer(b, a, "back", push=True)


def no_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return False
    except OSError:
        return True


@pytest.mark.asyncio
@pytest.mark.skipif(no_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_ipv6_works(transport: str) -> None:
    async with connected_pair(transports=[transport], bind="tcp://[::1]:0") as (a, b):
        assert a.address.startswith("tcp://[::1]:")
        await transfer(b, a, "back")


# -- open and idle ----------------------------------------------------------------------------------


@virtual_time
async def test_with_nothing_going_on_nothing_is_scheduled() -> None:
    async with connected_pair() as (a, b):
        for number in range(3):
            await transfer(a, b, f"there {number}")
            await transfer(b, a, f"back {number}", push=True)
        await settle(a, b)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert loop.scheduled() == []
        before = a.statistics(), b.statistics()
        await asyncio.sleep(24 * 3600)
        assert (a.statistics(), b.statistics()) == before
        await transfer(a, b, "a day later")


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_connected_engines_do_nothing_while_there_is_nothing_to_do(transport: str) -> None:
    async with connected_pair(transports=[transport], bind="tcp://127.0.0.1:0") as (a, b):
        await asyncio.sleep(0.05)  # the last acknowledgements
        before = a.statistics(), b.statistics()
        loop, passes = asyncio.get_running_loop(), 0
        if hasattr(loop, "_run_once"):
            run_once = loop._run_once

            def counted() -> None:
                nonlocal passes
                passes += 1
                run_once()

            loop._run_once = counted
        await asyncio.sleep(0.3)
        assert (a.statistics(), b.statistics()) == before
        assert passes <= 3


# -- closing ----------------------------------------------------------------------------------------


@virtual_time
@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("state", ["offered", "asked", "granted", "moving"])
async def test_what_goes_on_when_an_engine_is_closed_ends_on_both_sides(who: str, state: str) -> None:
    async with Engines() as engines:
        a, b, c = [await engines.add(name) for name in "abc"]
        await transfer(a, b, "before")
        handles = {}
        if state != "asked":
            handles["producer"] = a.offer("t", [1])
        if state != "offered":
            handles["consumer"] = b.fetch("t", [1], sources=[a.address])
        for handle in handles.values():
            handle.start()
        await settle(a, b)
        if state == "moving":
            handles["producer"].layer_ready(0)
            await handles["consumer"].layer(0)
        closed, other = (a, b) if who == "producer" else (b, a)
        began = asyncio.get_running_loop().time()
        await engines.close(closed)
        assert asyncio.get_running_loop().time() - began < 1
        for side, handle in handles.items():
            if side == who:
                with pytest.raises(ClosedError, match="transfer 't': its engine was closed"):
                    await handle.wait()
            elif side == "producer" and state == "offered":
                assert not handle.done()
                handle.cancel()
                await handle._course.quiet()
            elif (side, state) == ("consumer", "asked"):
                with pytest.raises(PeerLostError, match="'t'.* closed"):
                    await handle.wait()
            else:
                with pytest.raises(TransferAborted, match="its engine was closed"):
                    await handle.wait()
        check_idle(other)
        await (transfer(c, b, "good") if who == "producer" else transfer(a, c, "good"))


@virtual_time
async def test_an_offer_that_nobody_took_ends_with_its_engine() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        with pytest.raises(ClosedError, match="its engine was closed"):
            async with a.offer("t", [1]):
                await a.aclose()
        await a.aclose()


@virtual_time
async def test_once_it_is_closed_it_does_nothing_and_says_so() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        begun, later = a.offer("begun", [1]), a.offer("later", [2])
        begun.start()
        await a.aclose()
        for use in (lambda: a.offer("t", [1]), lambda: a.fetch("t", [1]), later.start):
            with pytest.raises(ClosedError, match="the engine is closed"):
                use()
        begun.layer_ready(0)
        begun.cancel()
        with pytest.raises(ClosedError):
            await begun.wait()
        assert a.statistics().leases == 0
        await a.aclose()
        check_idle(b)


@virtual_time
async def test_closing_may_be_asked_for_by_several_and_they_return_together() -> None:
    async with Engines(network=FaultyNetwork(seed=1)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        engines.network.cut(a.address, b.address)  # so that it takes a while
        offer = a.offer("t", [1], to=[b.address])
        offer.start()
        await settle(a)
        closings = [asyncio.ensure_future(a.aclose()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not any(closing.done() for closing in closings)
        await asyncio.wait(closings)
        with pytest.raises(ClosedError):
            await offer.wait()


@virtual_time
async def test_closing_waits_a_second_at_most_for_peers_that_do_not_answer() -> None:
    async with Engines(network=FaultyNetwork(seed=1)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        engines.network.cut(b.address, a.address)
        offer = a.offer("t", [1], to=[b.address])
        offer.start()
        await settle(a)
        began = asyncio.get_running_loop().time()
        await a.aclose()
        assert asyncio.get_running_loop().time() - began <= 1.1
        with pytest.raises(ClosedError):
            await offer.wait()


class Recorded(MemoryTransport):
    """Tells when it is closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        super().__init__(MemoryHub())
        self._name, self._closed_in_order = name, closed

    @property
    def name(self) -> str:
        return self._name

    async def aclose(self) -> None:
        self._closed_in_order.append(self._name)
        await super().aclose()


@pytest.mark.asyncio
async def test_nccl_ends_before_others_free_what_they_have() -> None:
    closed: list[str] = []
    names = ("cuda_ipc", "nccl", "tcp")
    async with Engines() as engines:
        a = await engines.add("a", transports=[Recorded(name, closed) for name in names])
        await a.aclose()
    assert closed[0] == "nccl"
    assert sorted(closed) == sorted(names)


@virtual_time
async def test_who_is_cancelled_while_closing_is_told_when_it_is_closed() -> None:
    async with Engines(network=FaultyNetwork(seed=1)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        engines.network.cut(b.address, a.address)
        offer = a.offer("t", [1], to=[b.address])
        offer.start()
        await settle(a)
        closing = asyncio.ensure_future(a.aclose())
        for _ in range(3):
            await asyncio.sleep(0.1)
            closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        with pytest.raises(ClosedError, match="is closed"):
            a.offer("t", [1])
        with pytest.raises(ClosedError):
            await offer.wait()


@virtual_time
async def test_closing_waits_for_what_reads_its_blocks() -> None:
    settings = Settings(lease_ns=SECOND + SECOND // 2)
    network = FaultyNetwork(seed=1)
    async with Engines(network=network, settings=settings) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        offer, fetch = a.offer("t", [1]), b.fetch("t", [1], sources=[a.address])
        offer.start()
        fetch.start()
        offer.layer_ready(0)
        await fetch.layer(0)
        lease = a._core.peers.sessions[0].lease_given
        network.cut(a.address, b.address)  # the consumer can't be told, and might read on
        await a.aclose()
        assert asyncio.get_running_loop().virtual.clock() > lease
        assert a.statistics().quarantined == 0
        with pytest.raises(ClosedError):
            await offer.wait()
        with pytest.raises(PeerLostError):
            await fetch.wait()
        check_idle(b)


@pytest.mark.asyncio
async def test_engines_that_are_closed_at_once_do_not_wait_for_each_other() -> None:
    async with Engines() as engines:
        made = [await engines.add(name, transports=["shm"], bind="tcp://127.0.0.1:0") for name in "abc"]
        for number, one in enumerate(made):
            await transfer(one, made[number - 1], f"t{number}")
        async with asyncio.timeout(20):
            await asyncio.gather(*(engine.aclose() for engine in made))


@pytest.mark.asyncio
async def test_an_engine_needs_a_transport() -> None:
    engines = Engines(network=MemoryNetwork())
    with pytest.raises(ValueError, match="at least one transport"):
        TransferEngine(await engines.cache(), transports=[])
