"""Every channel passes the same suite, the mocked ones included."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.control.streams import StreamChannel
from aiokv.control.tls import Tls
from aiokv.control.zmq import ZmqChannel
from aiokv.testing.conformance import channels
from aiokv.testing.faultynetwork import FaultyNetwork


def over_zmq(*, queue):
    return lambda address: ZmqChannel(address or "tcp://127.0.0.1:0", queue=queue)


def over_streams(*, queue):
    return lambda address: StreamChannel(address or "stream://127.0.0.1:0", queue=queue)


def certificates():
    here = Path(__file__).parent / "certificates"
    with tempfile.TemporaryDirectory() as private:  # anybody can read a checkout
        key = Path(shutil.copy(here / "a.key", private))
        key.chmod(0o600)
        return Tls.load(here / "a.pem", key, ca=here / "ca.pem")


TLS = certificates()


def over_tls(*, queue):
    return lambda address: StreamChannel(
        (address or "tls://127.0.0.1:0").partition("#")[0], queue=queue, tls=TLS
    )


def over_network(network):
    names = itertools.count()
    return lambda address: network.channel(address or f"memory://{next(names)}")


KITS = {
    "zmq": over_zmq,
    "stream": over_streams,
    "tls": over_tls,
    "memory": lambda *, queue: over_network(MemoryNetwork(queue=queue)),
    "faultless": lambda *, queue: over_network(FaultyNetwork(0, queue=queue)),
}


@pytest.mark.parametrize("case", channels.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
@pytest.mark.asyncio
async def test_conformance(kit, case):
    await case(kit)
