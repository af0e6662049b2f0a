"""What a process uses and holds, as the benchmarks count it."""

from __future__ import annotations

import os

import pytest

from aiokv.bench.usage import holdings, resident_bytes, used_cpu_ns, used_cpu_of_loop_ns
from aiokv.errors import TransferAborted
from aiokv.testing.pairs import connected_pair


@pytest.mark.asyncio
@pytest.mark.may_block(reason="it reads what the kernel says of this process")
async def test_what_is_opened_is_held_until_it_is_closed() -> None:
    async with connected_pair() as (engine, _):
        before = holdings(engine)
        pipe = os.pipe()
        offer = engine.offer("t", [1, 2])
        offer.start()
        during = holdings(engine)
        offer.cancel()
        with pytest.raises(TransferAborted):
            await offer.wait()
        for descriptor in pipe:
            os.close(descriptor)
        assert holdings(engine) == before
    more = {name: during[name] - before[name] for name in during if during[name] != before[name]}
    assert more == {"descriptors": 2, "offers": 1, "leases": 1, "blocks_held": 2}


def test_memory_and_cpu_time_are_counted() -> None:
    assert resident_bytes() > 1 << 20
    assert 0 < used_cpu_of_loop_ns() <= used_cpu_ns()
