"""The kit for two processes, on host memory: needs no GPU."""

from __future__ import annotations

import pytest
from remote import TwoProcessesKit

from aiokv.device.host import HostDevice
from aiokv.testing.conformance.transports import CASES, Case


@pytest.mark.asyncio
@pytest.mark.may_block("it asks the other process, and waits")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("transport", ["shm:ShmTransport", "tcp:TcpTransport"])
async def test_conformance_in_two_processes(transport: str, case: Case, other, seed: int) -> None:
    async with TwoProcessesKit(seed, other, f"aiokv.transports.{transport}", HostDevice()) as kit:
        await case(kit)
