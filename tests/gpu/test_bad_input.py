"""What a caller may get wrong with a GPU, and what it gets for it."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice
from aiokv.device.cudacosts import TYPICAL
from aiokv.errors import CapacityError, DeviceError, LayoutMismatch
from aiokv.proto.layout import CacheLayout

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it waits for the GPU")]

LAYOUT = CacheLayout.attention(layers=2, blocks=16, block_size=4, heads=2, head_size=16, dtype="bfloat16")
SHAPE = LAYOUT.groups[0].shape


def tensor(device: str = "cuda:0", shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def test_cpu_tensors_for_a_gpu(device: CudaDevice) -> None:
    with pytest.raises(LayoutMismatch, match="layer 0: on cpu, not on cuda:0, the device's"):
        KVCache.from_tensors(LAYOUT, [tensor("cpu"), tensor("cpu")], device=device)
    with pytest.raises(LayoutMismatch, match="layer 1: on cpu, not on cuda:0, where layer 0 is"):
        KVCache.from_tensors(LAYOUT, [tensor(), tensor("cpu")])
    with pytest.raises(LayoutMismatch, match="layer 1: on cuda:0, not in host memory, where layer 0 is"):
        KVCache.from_tensors(LAYOUT, [tensor("cpu"), tensor()])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_and_streams_of_another_gpu(device: CudaDevice) -> None:
    with pytest.raises(LayoutMismatch, match="layer 0: on cuda:1, not on cuda:0, the device's"):
        KVCache.from_tensors(LAYOUT, [tensor("cuda:1"), tensor("cuda:1")], device=device)
    with pytest.raises(DeviceError, match="stream of device 1"):
        device.adopt(torch.cuda.Stream(device="cuda:1"))


def test_tensors_that_are_not_what_the_layout_says(device: CudaDevice) -> None:
    narrow = torch.zeros((*SHAPE[:-1], 2 * SHAPE[-1]), dtype=torch.bfloat16, device="cuda")[..., ::2]
    with pytest.raises(LayoutMismatch, match="elements of a head are not contiguous"):
        KVCache.from_tensors(LAYOUT, [narrow, tensor()], device=device)
    overlapping = tensor().as_strided(SHAPE, (0, *tensor().stride()[1:]))
    with pytest.raises(LayoutMismatch, match="overlap along axis"):
        KVCache.from_tensors(LAYOUT, [overlapping, overlapping], device=device)
    one = tensor()
    with pytest.raises(LayoutMismatch, match="also that of layer 0"):
        KVCache.from_tensors(LAYOUT, [one, one], device=device)


def test_registration_keeps_tensors_alive(device: CudaDevice) -> None:
    tensors = [tensor(), tensor()]
    tensors[1].fill_(3)
    storage = weakref.ref(tensors[1])
    cache = KVCache.from_tensors(LAYOUT, tensors, device=device)
    address = cache.buffers[1].address
    del tensors
    gc.collect()
    torch.cuda.empty_cache()
    others = [tensor() for _ in range(50)]
    assert address not in {other.untyped_storage().data_ptr() for other in others}
    found = cache.tensor(1)
    assert isinstance(found, torch.Tensor)
    assert (found == 3).all()
    del found
    cache.close()
    gc.collect()
    assert storage() is None


def test_a_cache_without_a_device_makes_its_own() -> None:
    cache = KVCache.from_tensors(LAYOUT, [tensor(), tensor()])
    assert cache.device.kind == "cuda"
    assert isinstance(cache.device, CudaDevice)
    cache.close()


def test_memory_outlives_the_cache_that_tensors_were_taken_of(device: CudaDevice) -> None:
    cache = KVCache.allocate(LAYOUT, device=device)
    found = cache.tensor(0)
    cache.close()
    assert isinstance(found, torch.Tensor)
    found.fill_(1)
    assert (found == 1).all()


def test_no_memory_at_the_start(device: CudaDevice) -> None:
    with pytest.raises(CapacityError, match="of CUDA device 0: only"):
        device.allocate(1 << 42)
    with pytest.raises(CapacityError, match="of CUDA device 0"):
        CudaDevice(0, staging_bytes=1 << 42, costs=TYPICAL)
    huge = CacheLayout.attention(
        layers=80, blocks=1 << 20, block_size=16, heads=8, head_size=128, dtype="bfloat16"
    )
    with pytest.raises(CapacityError):
        KVCache.allocate(huge, device=device)


def test_no_such_gpu() -> None:
    with pytest.raises(DeviceError, match="CUDA device 99 can't be used"):
        CudaDevice(99)


def test_a_sticky_error_closes_the_engine_and_the_process_lives() -> None:
    """In a process of its own: nothing works on the GPU there afterwards."""
    code = """
        import asyncio, torch, cupy
        from aiokv.device.cache import KVCache
        from aiokv.device.cuda import CudaDevice
        from aiokv.device.cudacosts import TYPICAL
        from aiokv.errors import AiokvError, DeviceError
        from aiokv.proto.layout import CacheLayout
        from aiokv.testing.pairs import Engines

        layout = CacheLayout.attention(
            layers=2, blocks=16, block_size=4, heads=2, head_size=16, dtype="bfloat16"
        )
        broken = cupy.RawKernel('extern "C" __global__ void broken(int* at) { *at = 1; }', "broken")

        async def main():
            device = CudaDevice(0, costs=TYPICAL)
            caches = [KVCache.allocate(layout, device=device) for _ in range(2)]
            async with Engines() as engines:
                producer = await engines.add("a", cache=caches[0])
                consumer = await engines.add("b", cache=caches[1])
                offer = producer.offer("t", [1, 2])
                offer.start()
                fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
                fetch.start()
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    broken((1,), (1,), (8,), stream=cupy.cuda.ExternalStream(stream.cuda_stream))
                    offer.layer_ready(0)
                for transfer in (offer, fetch):
                    try:
                        await transfer.wait()
                    except AiokvError as error:
                        print(type(error).__name__, error, flush=True)
                try:
                    producer.offer("u", [1])
                except DeviceError as error:
                    print("REFUSED", error, flush=True)
            print("LIVES", device, flush=True)

        asyncio.run(main())
        print("ENDED", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=50, check=False
    )
    said = done.stdout
    assert "DeviceError" in said, (said, done.stderr)
    assert "REFUSED" in said
    assert "LIVES <CudaDevice 0 lost>" in said
    assert "ENDED" in said, (said, done.stderr)
    assert "closes: CUDA device 0 is lost" in done.stderr
