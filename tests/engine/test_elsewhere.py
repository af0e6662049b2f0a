"""Where there is nothing that only Linux has, ``memory`` and ``tcp`` work all the same."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from aiokv.device import timer
from aiokv.testing.pairs import connected_pair, transfer
from aiokv.transports.vectors import VectorIO


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timerfd, no memfd, no pidfd, and no way to another process's memory."""

    def absent(*_: Any) -> Any:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for name in ("memfd_create", "pidfd_open", "timerfd_create"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(timer, "open_timerfd", absent)
    monkeypatch.setattr(VectorIO, "read_process", absent)


@pytest.mark.asyncio
async def test_memory() -> None:
    async with connected_pair() as (producer, consumer):
        await transfer(producer, consumer, "t")
        assert set(consumer.statistics().received_by_transport) == {"memory"}


@pytest.mark.asyncio
async def test_tcp() -> None:
    async with connected_pair(transports=["tcp"], bind="tcp://127.0.0.1:0") as (producer, consumer):
        await transfer(producer, consumer, "t", push=True)
        assert set(consumer.statistics().received_by_transport) == {"tcp"}


@pytest.mark.asyncio
async def test_tcp_takes_the_place_of_what_is_not_there() -> None:
    names = ["shm", "cma", "tcp"]
    async with connected_pair(transports=names, bind="tcp://127.0.0.1:0") as (producer, consumer):
        await transfer(producer, consumer, "t")
        assert set(consumer.statistics().received_by_transport) == {"tcp"}
