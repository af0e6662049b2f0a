"""The pieces of an engine by name or address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import aiokv
from aiokv.control.choice import channel_at, checked_binding
from aiokv.control.streams import StreamChannel
from aiokv.control.zmq import ZmqChannel
from aiokv.engine.choices import (
    CUDA_TRANSPORTS,
    TRANSPORTS,
    checked_ports,
    checked_streams,
    checked_transports,
    host_of,
    transports_named,
)
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, transfer
from aiokv.transports.memory import MemoryHub, MemoryTransport
from aiokv.transports.tcp import TcpTransport


def test_by_default_all_transports_are_used_best_first() -> None:
    assert [transport.name for transport in transports_named(None)] == list(TRANSPORTS)
    assert [transport.name for transport in transports_named(["tcp", "shm"])] == ["tcp", "shm"]
    assert checked_transports(None, "cuda") == list(CUDA_TRANSPORTS)
    for name in CUDA_TRANSPORTS:
        assert transports_named([name], kind="cuda")[0].name == name
    assert not transports_named(["shm"], kind="cuda")[0].one_sided


def test_a_transport_of_the_callers_is_taken_as_it_is() -> None:
    mine = MemoryTransport(MemoryHub())
    assert transports_named([mine]) == [mine]


def test_each_engine_has_transports_of_its_own() -> None:
    assert transports_named(["shm"])[0] is not transports_named(["shm"])[0]


def test_a_transport_that_is_not_there_is_refused_and_those_that_are_named() -> None:
    with pytest.raises(ValueError, match="no transport 'rdma'; there are shm, cma, tcp"):
        transports_named(["shm", "rdma"])
    with pytest.raises(ValueError, match="at least one"):
        transports_named([])


@pytest.mark.parametrize(
    ("wanted", "kind", "message"),
    [
        ("tcp", TypeError, "transports is a list of names, not the one name 'tcp'"),
        ([None], TypeError, "transports has None, which is neither a name nor a transport"),
        ([TcpTransport], TypeError, "transports has <class .*, which is neither"),
        (5, TypeError, "transports is a list of names or transports, not 5"),
        ({"tcp"}, TypeError, "transports is a list of names or transports, not {'tcp'}"),
        (["tcp", "shm", "tcp"], ValueError, "transports must name each once, not 'tcp' 2 times"),
        (["tcp", TcpTransport()], ValueError, "transports must name each once, not 'tcp' 2 times"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_is_no_choice_of_transports_is_refused(wanted: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        checked_transports(wanted)


@pytest.mark.parametrize(
    ("ports", "kind", "message"),
    [
        (7000, TypeError, "data_ports is a list of port numbers, not 7000"),
        ("7000", TypeError, "data_ports is a list of port numbers, not '7000'"),
        ([True], TypeError, "data_ports lists port numbers, not True"),
        (["7000"], TypeError, "data_ports lists port numbers, not '7000'"),
        ([7000, 0], ValueError, "data_ports lists ports from 1 to 65535, not 0"),
    ],
)
def test_what_are_no_ports_is_refused(ports: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        checked_ports(ports)


def test_ports_may_be_a_range() -> None:
    assert checked_ports(range(7000, 7003)) == (7000, 7001, 7002)
    assert checked_ports([]) == ()


@pytest.mark.parametrize(
    ("streams", "kind"), [("2", TypeError), (True, TypeError), (0, ValueError), (17, ValueError)]
)
def test_what_is_no_number_of_streams_is_refused(streams: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^tcp_streams is a"):
        checked_streams(streams)


def test_too_few_ports_for_all_that_listen_are_refused() -> None:
    for ports in ([7000], [7000, 7000]):
        with pytest.raises(ValueError, match="data_ports has 1 port, and nccl and tcp take one each: list 2"):
            checked_ports(ports, ["cuda_ipc", "nccl", "shm", "tcp"])
    assert checked_ports([7000], ["shm", "tcp"]) == (7000,)
    assert checked_ports([], ["nccl", "tcp"]) == ()
    assert checked_ports([7000, 7001], ["nccl", "tcp"]) == (7000, 7001)


def test_staging_memory_is_as_large_as_the_settings_say() -> None:
    settings = Settings(staging_bytes=1 << 20, pinned_bytes=2 << 20, nccl_staging_bytes=3 << 20)
    cuda_ipc, nccl, shm, tcp = transports_named(None, kind="cuda", settings=settings)
    assert cuda_ipc.name == "cuda_ipc"
    assert nccl._staging == 3 << 20
    for each in (shm, tcp):
        assert (each._staging_bytes, each._pinned_bytes) == (1 << 20, 2 << 20)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="allocates caches")
async def test_ports_and_the_host_that_peers_are_told_are_those_of_tcp() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with aiokv.KVCache.allocate(LAYOUT) as there, aiokv.KVCache.allocate(LAYOUT) as here:
        async with (
            aiokv.TransferEngine(here, transports=["tcp"]) as consumer,
            aiokv.TransferEngine(
                there,
                bind="tcp://127.0.0.1:0",
                advertise="tcp://localhost",
                transports=["tcp"],
                data_ports=[port],
                tcp_streams=3,
            ) as producer,
        ):
            assert producer._core is not None
            description = producer._core.peers._me.hello.transports["tcp"]
            assert msgspec.msgpack.decode(description)[:2] == ["localhost", port]
            await transfer(producer, consumer, "t")


@pytest.mark.parametrize(
    ("bind", "advertise", "kind", "message"),
    [
        (None, None, TypeError, "bind is an address, tcp://host:port, not None"),
        (5000, None, TypeError, "bind is an address, tcp://host:port, not 5000"),
        ("tcp://127.0.0.1:0", b"tcp://a:1", TypeError, "advertise is an address, tcp://host:port, not b'"),
        ("127.0.0.1:0", None, ValueError, "'127.0.0.1:0' is not tcp://host:port"),
        ("http://a:0", None, ValueError, "'http://a:0' is not tcp://.*, stream://.* or tls://host:port"),
    ],
)
def test_what_no_channel_can_listen_at_is_refused(
    bind: Any, advertise: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        checked_binding(bind, advertise)


IMPORTED_OFF_THE_LOOP = """
import asyncio, importlib, sys, threading
import aiokv.engine.choices as choices

def seen(name):
    assert threading.current_thread() is not threading.main_thread()
    return importlib.import_module(name)

async def main():
    choices.import_module = seen
    await choices.imported(["shm", "tcp"], "tcp://127.0.0.1:0")
    names = ["aiokv.transports.shm", "aiokv.transports.tcp", "aiokv.control.zmq"]
    assert [name in sys.modules for name in names] == [True] * 3
    choices.import_module = None  # the second time nothing is left to be done
    await choices.imported(["shm", "tcp"], "tcp://127.0.0.1:0")

assert "zmq" not in sys.modules
asyncio.run(main())
"""


def test_what_takes_long_to_import_is_imported_off_the_loop() -> None:
    subprocess.run(
        [sys.executable, "-c", IMPORTED_OFF_THE_LOOP],
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        check=True,
    )


def test_a_control_channel_is_made_for_an_address() -> None:
    assert isinstance(channel_at("tcp://127.0.0.1:0", None), ZmqChannel)
    assert isinstance(channel_at("stream://127.0.0.1:0", None), StreamChannel)
    with pytest.raises(ValueError, match="advertise"):
        channel_at("tcp://0.0.0.0:0", None)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1"),
        ("tcp://[::1]:5000", "::1"),
        ("tcp://0.0.0.0:5000", "0.0.0.0"),
        ("tcp://*:5000", "0.0.0.0"),
        ("tcp://prefill-3.cluster.local:5000", "prefill-3.cluster.local"),
        ("stream://192.0.2.1:5000", "192.0.2.1"),
        ("tls://prefill-3:5000#" + "0" * 64, "prefill-3"),
        ("memory://a", "127.0.0.1"),
    ],
)
def test_data_is_served_at_the_host_of_the_control_address(address: str, host: str) -> None:
    assert host_of(address) == host
