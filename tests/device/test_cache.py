"""Caches: memory of aiokv's own as tensors, and tensors of others as registered memory."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.device.mocked import MockedBuffer, MockedDevice
from aiokv.errors import BusyError, CapacityError, ClosedError, LayoutMismatch
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.plan import GroupBlocks, Side, plan_copy

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8"]


def layout_of(axes: str = "sbthd", *, dtype: str = "bfloat16", layers: int = 2) -> CacheLayout:
    return CacheLayout.attention(
        layers=layers,
        blocks=5,
        block_size=4,
        heads=3,
        head_size=8,
        dtype=dtype,
        axes=axes,
        split="s" not in axes,
    )


LAYOUT = layout_of()
SHAPE = LAYOUT.groups[0].shape


def planes(cache: KVCache, layer: int) -> tuple[torch.Tensor, ...]:
    found = cache.tensor(layer)
    return found if isinstance(found, tuple) else (found,)


def placed(cache: KVCache, layer: int, plane: int, index: Sequence[int]) -> bytes:
    """The bytes of one element, by the cache's placement."""
    number = cache.layout.group_of(layer)
    group, place = cache.layout.groups[number], cache.placement.groups[number]
    buffer, offset = place.layers[group.layers.index(layer)][plane]
    strides = dict(zip("bsth", place.strides, strict=True))
    size = group.head_bytes // group.head_size
    at = offset + sum(strides.get(axis, size) * step for axis, step in zip(group.axes, index, strict=True))
    held = cache.buffers[buffer]
    assert isinstance(held, HostBuffer | MockedBuffer)
    return bytes(held.view[at : at + size])


def check_placed(cache: KVCache) -> None:
    """The tensors and the placement name the same memory, element by element."""
    for layer in range(cache.layout.layers):
        for number, tensor in enumerate(planes(cache, layer)):
            data = torch.randint(0, 100, tensor.shape, dtype=torch.uint8).to(tensor.dtype)
            tensor.copy_(data)
            for index in np.ndindex(*tensor.shape):
                one = tensor[index].reshape(1).view(torch.uint8).numpy().tobytes()
                assert placed(cache, layer, number, index) == one


# -- allocate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ["sbthd", "bshtd", "bhtsd", "bhtd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_allocated_memory_is_seen_as_tensors(axes: str, dtype: str) -> None:
    layout = layout_of(axes, dtype=dtype)
    cache = KVCache.allocate(layout)
    assert (cache.layout, cache.device.kind, len(cache.buffers)) == (layout, "host", 1)
    for layer in range(2):
        found = planes(cache, layer)
        assert len(found) == (2 if axes == "bhtd" else 1)
        for tensor in found:
            assert (tuple(tensor.shape), tensor.dtype) == (layout.groups[0].shape, getattr(torch, dtype))
            assert not tensor.view(torch.uint8).any()
    check_placed(cache)
    cache.close()


def test_a_layer_is_the_same_tensor_each_time() -> None:
    cache = KVCache.allocate(LAYOUT)
    assert cache.tensor(1) is cache.tensor(1)
    with pytest.raises(IndexError, match="layer 2"):
        cache.tensor(2)
    cache.close()


def test_groups_of_different_kinds_share_one_buffer() -> None:
    latent = GroupLayout(
        layers=(1, 3),
        blocks=7,
        block_size=2,
        heads=(0, 1),
        total_heads=1,
        head_size=5,
        dtype="int8",
        axes="btd",
        kind="mla",
    )
    group = msgspec.structs.replace(LAYOUT.groups[0], layers=(0, 2))
    cache = KVCache.allocate(CacheLayout(groups=(group, latent)))
    assert [tuple(planes(cache, layer)[0].shape) for layer in range(4)] == [SHAPE, (7, 2, 5)] * 2
    check_placed(cache)
    cache.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_allocated_host_memory_has_a_descriptor() -> None:
    cache = KVCache.allocate(LAYOUT)
    (buffer,) = cache.buffers
    assert isinstance(buffer, HostBuffer)
    assert buffer.fd is not None
    cache.close()
    assert buffer.fd is None


def test_a_device_makes_its_own_memory() -> None:
    device = MockedDevice(seed=1)
    cache = KVCache.allocate(layout_of("bthd"), device=device)
    assert cache.device is device
    assert isinstance(cache.buffers[0], MockedBuffer)
    check_placed(cache)
    cache.close()


def test_memory_that_is_not_there() -> None:
    group = msgspec.structs.replace(LAYOUT.groups[0], blocks=1 << 31)
    with pytest.raises(CapacityError, match="bytes of host memory"):
        KVCache.allocate(CacheLayout(groups=(group,)))


# -- close ------------------------------------------------------------------------------------------


def test_a_closed_cache_has_no_tensors_but_those_held_stay() -> None:
    cache = KVCache.allocate(LAYOUT)
    held = cache.tensor(0)
    assert isinstance(held, torch.Tensor)
    held.fill_(3)
    cache.close()
    cache.close()
    with pytest.raises(ClosedError):
        cache.tensor(0)
    gc.collect()
    assert (held == 3).all()
    del held
    gc.collect()
    assert "memfd:aiokv" not in Path("/proc/self/maps").read_text()


# -- from_tensors -----------------------------------------------------------------------------------


def apart() -> list[torch.Tensor]:
    return [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(2)]


def one_storage() -> list[torch.Tensor]:
    return list(torch.zeros((2, *SHAPE), dtype=torch.bfloat16))


def layers_inside_blocks() -> list[torch.Tensor]:
    _, blocks, tokens, heads, size = SHAPE
    whole = torch.zeros((blocks, 2, 2, tokens, heads, size), dtype=torch.bfloat16)
    return [whole[:, layer].transpose(0, 1) for layer in range(2)]


def padded() -> list[torch.Tensor]:
    wide = [torch.zeros((2, 6, 4, 5, 16), dtype=torch.bfloat16) for _ in range(2)]
    return [one[:, 1:, :, 1:4, 8:] for one in wide]


def heads_first() -> list[torch.Tensor]:
    return [torch.zeros((5, 3, 2, 4, 8), dtype=torch.bfloat16).permute(2, 0, 3, 1, 4) for _ in range(2)]


@pytest.mark.parametrize("make", [apart, one_storage, layers_inside_blocks, padded, heads_first])
def test_tensors_are_registered_where_they_are(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    cache = KVCache.from_tensors(LAYOUT, tensors)
    assert [cache.tensor(layer) is tensors[layer] for layer in range(2)] == [True, True]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert {buffer.address: buffer.nbytes for buffer in cache.buffers} == storages
    assert cache.placement.buffers == tuple(buffer.nbytes for buffer in cache.buffers)
    check_placed(cache)
    cache.close()


def test_keys_and_values_joined_in_the_last_axis_of_views_of_one_storage() -> None:
    layout = layout_of("bhtsd")
    for shape in ((2, 5, 3, 4, 16), (5, 2, 3, 4, 16)):  # layers outermost, or inside the blocks
        whole = torch.zeros(shape, dtype=torch.bfloat16)
        tensors = list(whole if shape[0] == 2 else whole.unbind(1))
        cache = KVCache.from_tensors(layout, tensors)
        assert len(cache.buffers) == 1
        for layer, tensor in enumerate(tensors):
            (found,) = planes(cache, layer)
            assert tuple(found.shape) == (5, 3, 4, 2, 8)
            assert found.data_ptr() == tensor.data_ptr()
        check_placed(cache)
        cache.close()
    with pytest.raises(LayoutMismatch, match="layer 0: shape"):
        KVCache.from_tensors(layout, list(torch.zeros((2, 5, 3, 4, 12), dtype=torch.bfloat16)))


def test_a_latent_vector_for_each_token() -> None:
    layout = CacheLayout.latent(layers=2, blocks=5, block_size=4, latent_size=24, dtype="bfloat16")
    tensors = list(torch.zeros((2, 5, 4, 24), dtype=torch.bfloat16))
    cache = KVCache.from_tensors(layout, tensors)
    assert cache.tensor(1) is tensors[1]
    check_placed(cache)
    cache.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_of_keys_and_values(dtype: str) -> None:
    layout = layout_of("bthd", dtype=dtype)
    shape = layout.groups[0].shape
    pairs = [
        (torch.zeros(shape, dtype=getattr(torch, dtype)), torch.zeros(shape, dtype=getattr(torch, dtype)))
        for _ in range(2)
    ]
    cache = KVCache.from_tensors(layout, pairs)
    assert len(cache.buffers) == 4
    assert cache.tensor(1) == pairs[1]
    check_placed(cache)
    cache.close()


def test_two_groups_may_share_memory_as_their_block_ids_tell_them_apart() -> None:
    group = msgspec.structs.replace(LAYOUT.groups[0], layers=(0,))
    layout = CacheLayout(groups=(group, msgspec.structs.replace(group, layers=(1,), kind="window", window=8)))
    shared = apart()[0]
    cache = KVCache.from_tensors(layout, [shared, shared])
    assert len(cache.buffers) == 1
    assert cache.placement.groups[0] == cache.placement.groups[1]
    cache.close()


def test_an_axis_of_one_step_may_have_any_stride() -> None:
    layout = CacheLayout.attention(
        layers=2, blocks=5, block_size=1, heads=1, head_size=8, dtype="float32", axes="bthd", split=True
    )
    shape = layout.groups[0].shape
    strange = torch.zeros(400).as_strided(shape, (8, 3, 1, 1))
    pairs = [(torch.zeros(shape), torch.zeros(shape)), (torch.zeros(shape), strange)]
    cache = KVCache.from_tensors(layout, pairs)
    check_placed(cache)
    cache.close()


def test_what_is_registered_lives_as_long_as_the_cache() -> None:
    tensors = apart()
    gone = [weakref.ref(tensor) for tensor in tensors]
    cache = KVCache.from_tensors(LAYOUT, tensors)
    tensors.clear()
    gc.collect()
    assert all(one() is not None for one in gone)
    cache.close()
    cache.close()
    gc.collect()
    assert all(one() is None for one in gone)
    with pytest.raises(ClosedError):
        cache.tensor(0)


def test_another_device_may_copy() -> None:
    device = MockedDevice(seed=1)
    cache = KVCache.from_tensors(LAYOUT, apart(), device=device)
    assert cache.device is device
    cache.close()


def zeros(shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype)


SAME = zeros()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (zeros((2, 5, 4, 3, 9)), r"layer 1: shape \(2, 5, 4, 3, 9\), but \(2, 5, 4, 3, 8\).*sbthd"),
        (zeros((5, 4, 3, 8)), "layer 1: shape"),
        (zeros(dtype=torch.float16), "layer 1: torch.float16, but the layout says bfloat16"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16, device="meta"), "layer 1: on meta, not in host memory"),
        (zeros((2, 5, 4, 8, 3)).transpose(3, 4), "layer 1: the elements of a head are not contiguous"),
        (zeros((2, 5, 4, 1, 8)).expand(SHAPE), "layer 1: elements overlap along axis h"),
        (zeros((2, 9, 4, 3, 8))[:, :5], r"layer 1: byte strides \(192, 1728, 48, 16\)"),
        (SAME, "layer 1: its memory is also that of layer 0"),
        ((zeros(), zeros()), "layer 1: the layout wants one tensor, got 2"),
        ((zeros(),), "layer 1: the layout wants one tensor"),
    ],
)
def test_what_differs_from_the_layout_is_named(second: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message) as caught:
        KVCache.from_tensors(LAYOUT, [SAME, second])
    assert isinstance(caught.value, ValueError)


def test_a_missing_layer_or_half_is_named() -> None:
    with pytest.raises(LayoutMismatch, match="1 layers of tensors for a layout of 2"):
        KVCache.from_tensors(LAYOUT, [zeros()])
    split, shape = layout_of("bthd"), SHAPE[1:]
    good = (zeros(shape), zeros(shape))
    for bad in (zeros(shape), (zeros(shape),), (zeros(shape),) * 3):
        with pytest.raises(LayoutMismatch, match="layer 1: the layout wants a pair of K and V"):
            KVCache.from_tensors(split, [good, bad])
    with pytest.raises(LayoutMismatch, match="layer 1: its memory is also that of layer 1"):
        KVCache.from_tensors(split, [good, (SAME[0], SAME[0])])


# -- the whole way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [apart, layers_inside_blocks, padded, heads_first])
def test_tokens_move_between_registered_and_allocated_memory(make: Callable[[], list[torch.Tensor]]) -> None:
    tensors = make()
    for tensor in tensors:
        tensor.copy_(torch.randn(SHAPE))
    source = KVCache.from_tensors(LAYOUT, tensors)
    target = KVCache.allocate(layout_of("bhtd"))
    sides = [
        Side(cache.layout, cache.placement, (GroupBlocks(0, np.array(ids, dtype=np.int64)),))
        for cache, ids in ((source, [3, 0, 4]), (target, [1, 2, 0]))
    ]
    plan = plan_copy(*sides, first_token=0, tokens=12, heads=(0, 3))
    device = HostDevice()
    for layer in plan.layers:
        for chunk in plan.chunks((layer,), 1000):
            device.copy(plan, chunk, source.buffers, target.buffers, stream=device.stream())
        for half, tensor in enumerate(planes(target, layer)):
            assert torch.equal(tensor[[1, 2, 0]].transpose(1, 2), tensors[layer][half][[3, 0, 4]])
            assert not tensor[[3, 4]].any()
    source.close()
    target.close()


# -- how long it lives ------------------------------------------------------------------------------


def test_as_a_context_manager_it_closes_itself() -> None:
    with pytest.raises(LookupError), KVCache.allocate(LAYOUT) as cache:
        assert cache.tensor(0) is not None
        raise LookupError
    with pytest.raises(ClosedError, match="this KV cache was closed"):
        cache.tensor(0)


def test_while_it_is_used_it_cannot_be_closed() -> None:
    cache = KVCache.allocate(LAYOUT)
    with cache.kept_open(), cache.kept_open():
        with pytest.raises(BusyError, match="<KVCache of 2 layers, .* is in use; close the engine first"):
            cache.close()
        assert cache.tensor(0) is not None
    cache.close()
    cache.close()
    with pytest.raises(ClosedError, match="this KV cache was closed"), cache.kept_open():
        pass


def test_it_says_what_it_is() -> None:
    cache = KVCache.allocate(LAYOUT)
    (size,) = cache.placement.buffers
    assert repr(cache) == f"<KVCache of 2 layers, 5 blocks, {size} bytes in 1 buffers, host>"
    cache.close()
    assert repr(cache).endswith(", host closed>")


@pytest.mark.parametrize(
    ("layer", "kind"), [(1.0, TypeError), (None, TypeError), (2, IndexError), (-1, IndexError)]
)
def test_a_layer_that_cannot_be_meant_is_refused(layer: object, kind: type[Exception]) -> None:
    with KVCache.allocate(LAYOUT) as cache:
        assert cache.tensor(np.int64(1)) is cache.tensor(1)
        with pytest.raises(kind):
            cache.tensor(layer)
