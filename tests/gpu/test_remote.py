"""The kit for two processes, on host memory: needs no GPU."""

from __future__ import annotations

import pytest
from remote import TwoProcessesKit

from aiokv.device.host import HostDevice
from aiokv.testing.conformance.transports import CASES, Case

SOME = ("moves_parts_interleaved", "closed_by_the_producer", "forgotten_in_the_middle", "cancelled_connect")


@pytest.mark.asyncio
@pytest.mark.may_block("it asks the other process, and waits")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.__name__ in SOME], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("transport", ["shm:ShmTransport", "tcp:TcpTransport"])
async def test_conformance_in_two_processes(transport: str, case: Case, other, seed: int) -> None:
    async with TwoProcessesKit(seed, other, f"aiokv.transports.{transport}", HostDevice()) as kit:
        await case(kit)
