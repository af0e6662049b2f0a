"""Two GPUs in one process. (Between two processes the other tests use two, where there are two.)"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle

import numpy as np
import pytest
import torch
from remote import Other, TwoProcessesKit

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import Engine, contents, done
from aiokv.testing.conformance.transports import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.may_block("it asks another process, and waits"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(120),
]

TRANSPORTS = {
    "cuda_ipc": ("aiokv.transports.cuda_ipc:CudaIpcTransport", {}),
    "nccl": ("aiokv.transports.nccl:NcclTransport", {"staging": 32 << 20}),
}
LAYOUT = CacheLayout.attention(layers=4, blocks=64, block_size=16, heads=8, head_size=128, dtype="bfloat16")


@pytest.fixture(scope="module")
def second(other: Other, device: CudaDevice) -> Iterator[CudaDevice]:
    made = CudaDevice(torch.cuda.device_count() - 1)
    # What NCCL makes once for a process is no test's leak.
    asyncio.run(first_contact(other, [device, made]))
    yield made
    made.close()


async def first_contact(other: Other, devices: list[CudaDevice]) -> None:
    path, options = TRANSPORTS["nccl"]
    async with OneProcessKit(0, other, path, devices, options) as kit:
        await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))


class OneProcessKit(TwoProcessesKit):
    """All engines in this process, on the first GPU and the last in turn."""

    def __init__(self, seed: int, other: Other, path: str, devices: list[CudaDevice], options: dict) -> None:
        super().__init__(seed, other, path, devices[0], options)
        self.turn = cycle(devices)

    async def engine(self, layout: CacheLayout) -> Engine:
        self.made = 0
        return await super().engine(layout)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=next(self.turn))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("transport", "case"),
    [
        *(("cuda_ipc", case) for case in CASES),
        # The rest of NCCL's is between processes, as is its use.
        *(("nccl", case) for case in CASES if case.__name__ in ("moves_parts_interleaved", "many_lives")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_conformance_in_one_process(
    transport: str, case: Case, other: Other, device: CudaDevice, second: CudaDevice, seed: int
) -> None:
    path, options = TRANSPORTS[transport]
    async with OneProcessKit(seed, other, path, [device, second], options) as kit:
        await case(kit)


@pytest.mark.asyncio
async def test_each_reads_from_the_other_at_once(
    other: Other, device: CudaDevice, second: CudaDevice, seed: int
) -> None:
    path, options = TRANSPORTS["cuda_ipc"]
    async with OneProcessKit(seed, other, path, [device, second], options) as kit:
        first, last = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        paths = [await last.read_from(first), await first.read_from(last)]
        parts = [each.part(kit, number, tokens=512) for number, each in enumerate(paths)]
        expected = [part.path.consumer.copy_of_memory() for part in parts]
        for part, memory in zip(parts, expected, strict=True):
            part.apply(part.path.producer.copy_of_memory(), memory)
        events = []
        for part in parts:
            consumer = part.path.consumer.cache
            stream = consumer.device.stream()
            for chunk in part.chunks(1 << 20):
                event = part.path.end.read(part.plan, chunk, consumer.buffers, stream=stream)
                events.append((event, stream))
        for event, stream in events:
            await done(kit, event, stream)
        for part, memory in zip(parts, expected, strict=True):
            for buffer, wanted in zip(part.path.consumer.cache.buffers, memory, strict=True):
                assert np.array_equal(contents(buffer), wanted)
