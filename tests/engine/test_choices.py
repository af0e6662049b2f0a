"""The pieces of an engine by name or address."""

from __future__ import annotations

import pytest

from aiokv.control.zmq import ZmqChannel
from aiokv.engine.choices import TRANSPORTS, channel_at, host_of, transports_named
from aiokv.transports.memory import MemoryHub, MemoryTransport


def test_by_default_all_transports_are_used_best_first() -> None:
    assert [transport.name for transport in transports_named(None)] == list(TRANSPORTS)
    assert [transport.name for transport in transports_named(["tcp", "shm"])] == ["tcp", "shm"]


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


def test_a_control_channel_is_made_for_an_address() -> None:
    assert isinstance(channel_at("tcp://127.0.0.1:0", None), ZmqChannel)
    with pytest.raises(ValueError, match="advertise"):
        channel_at("tcp://0.0.0.0:0", None)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1"),
        ("tcp://[::1]:5000", "::1"),
        ("tcp://0.0.0.0:5000", "0.0.0.0"),
        ("tcp://prefill-3.cluster.local:5000", "prefill-3.cluster.local"),
        ("memory://a", "127.0.0.1"),
    ],
)
def test_data_is_served_at_the_host_of_the_control_address(address: str, host: str) -> None:
    assert host_of(address) == host
