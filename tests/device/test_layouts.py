"""Any two caches of the same KV: tensors in every form that engines keep them in, copied byte by byte right.

What must have moved is worked out by a slow reference, which knows each form by its axes alone: nothing of
placements, strides or plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.device.cache import KVCache
from aiokv.device.host import HostDevice
from aiokv.proto.layout import CacheLayout, GroupLayout, Kind, itemsize
from aiokv.proto.plan import GroupBlocks, Side, plan_copy

#: Forms that keep K and V: (axes, split, whether K and V are joined in the last axis).
FORMS = {
    "NHD, stacked outside": ("sbthd", False, False),
    "NHD, stacked in the block": ("bsthd", False, False),
    "NHD, stacked in the token": ("btshd", False, False),
    "NHD, split": ("bthd", True, False),
    "NHD, joined": ("bthsd", False, True),
    "HND, stacked outside": ("sbhtd", False, False),
    "HND, stacked in the block": ("bshtd", False, False),
    "HND, stacked in the head": ("bhstd", False, False),
    "HND, split": ("bhtd", True, False),
    "HND, joined": ("bhtsd", False, True),
}
LATENT_FORMS = {"latent": ("btd", False, False), "latent with a head axis": ("bthd", False, False)}

#: How the layers of a group lie in memory: each in its own, one after the other in one storage, inside the
#: blocks of one storage, or as parts of something wider.
STORAGES = ["apart", "one storage", "inside blocks", "padded"]


@dataclass
class Cache:
    """A cache and, for each layer, its tensors by the layout's axes."""

    kv: KVCache
    layers: list[tuple[torch.Tensor, ...]]
    blocks: tuple[GroupBlocks, ...]

    @property
    def side(self) -> Side:
        return Side(self.kv.layout, self.kv.placement, self.blocks)

    def head(self, layer: int, half: int, token: int, head: int) -> np.ndarray:
        """The bytes of one head of one token, to read or to write."""
        index = self.kv.layout.group_of(layer)
        group, listed = self.kv.layout.groups[index], self.blocks[index]
        block = int(listed.ids[(token - listed.start) // group.block_size])
        at = {"b": block, "s": half, "t": token % group.block_size, "h": head - group.heads[0]}
        tensor = self.layers[layer][half if group.split else 0]
        for axis in group.axes[:-1]:
            tensor = tensor[at[axis]]
        return tensor.view(torch.uint8).numpy()

    def memory(self) -> list[bytes]:
        return [bytes(buffer.view) for buffer in self.kv.buffers]


def tensors_of(group: GroupLayout, storage: str, joined: bool) -> tuple[list, list]:
    """What an engine would pass for the layers of one group, and the same by the layout's axes."""
    shape, count = list(group.shape), len(group.layers) * group.planes
    if joined:
        shape[-2:] = [2 * group.head_size]
    dtype = getattr(torch, group.dtype)
    match storage:
        case "apart":
            flat = [torch.zeros(shape, dtype=dtype) for _ in range(count)]
        case "one storage":
            flat = list(torch.zeros([count, *shape], dtype=dtype))
        case "inside blocks":
            axis = group.axes.index("b") + 1
            flat = list(torch.zeros([*shape[:axis], count, *shape[axis:]], dtype=dtype).unbind(axis))
        case _:
            wide = [size + 1 + at % 2 for at, size in enumerate(shape)]
            inner = tuple(slice(at % 2, at % 2 + size) for at, size in enumerate(shape))
            flat = [torch.zeros(wide, dtype=dtype)[inner] for _ in range(count)]
    by_axes = [one.unflatten(-1, (2, -1)) for one in flat] if joined else flat
    if not group.split:
        return flat, [(one,) for one in by_axes]
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    return pairs, pairs


@dataclass(frozen=True)
class Spec:
    """What two caches have in common in one group."""

    kind: Kind
    layers: tuple[int, ...]
    total_heads: int
    head_size: int
    dtype: str
    window: int


@st.composite
def specs(draw: st.DrawFn, total_heads: int) -> list[Spec]:
    kinds: list[Kind] = draw(
        st.sampled_from([["attention"], ["mla"], ["attention", "window"], ["window", "mla"]])
    )
    counts = [draw(st.integers(1, 2)) for _ in kinds]
    ends = list(accumulate(counts))
    return [
        Spec(
            kind,
            tuple(range(end - count, end)),
            1 if kind == "mla" else total_heads,
            draw(st.sampled_from([1, 3, 8])),
            draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
            draw(st.integers(1, 9)) if kind == "window" else 0,
        )
        for kind, count, end in zip(kinds, counts, ends, strict=True)
    ]


@st.composite
def caches(draw: st.DrawFn, common: list[Spec], wanted: tuple[int, int], tokens: int) -> Cache:
    """A cache of what is common in forms of its own, and blocks in it for the tokens."""
    groups, blocks, joins = [], [], []
    for spec in common:
        latent = spec.kind == "mla"
        axes, split, joined = draw(st.sampled_from(list((LATENT_FORMS if latent else FORMS).values())))
        size = draw(st.sampled_from([1, 2, 3, 4, 8]))
        # A window's list may begin with the block of the first token that is still needed.
        first = max(0, tokens - spec.window) // size if spec.kind == "window" else 0
        needed = -(-tokens // size) - first
        heads = (0, 1)
        if not latent:
            heads = draw(st.integers(0, wanted[0])), draw(st.integers(wanted[1], spec.total_heads))
        group = GroupLayout(
            layers=spec.layers,
            blocks=needed + draw(st.integers(0, 3)),
            block_size=size,
            heads=heads,
            total_heads=spec.total_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            axes=axes,
            split=split,
            kind=spec.kind,
            window=spec.window,
        )
        ids = draw(st.permutations(range(group.blocks)))[:needed]
        groups.append(group)
        joins.append(joined)
        blocks.append(GroupBlocks(first * size, np.array(ids, dtype=np.int64)))
    given, by_axes = [], []
    for group, joined in zip(groups, joins, strict=True):
        mine, theirs = tensors_of(group, draw(st.sampled_from(STORAGES)), joined)
        given += mine
        by_axes += theirs
    kv = KVCache.from_tensors(CacheLayout(groups=tuple(groups)), given)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    for buffer in kv.buffers:
        np.frombuffer(buffer.view, np.uint8)[:] = random.integers(0, 256, buffer.nbytes, dtype=np.uint8)
    return Cache(kv, by_axes, tuple(blocks))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cache, Cache, int, int, tuple[int, int]]:
    total = draw(st.integers(1, 4))
    first = draw(st.integers(0, total - 1))
    wanted = first, draw(st.integers(first + 1, total))
    tokens = draw(st.integers(1, 20))
    common = draw(specs(total))
    source, target = (draw(caches(common, wanted, tokens)) for _ in range(2))
    return source, target, draw(st.integers(0, tokens)), tokens, wanted


@settings(max_examples=200)
@given(cases(), st.integers(1, 300))
def test_every_byte_is_where_the_reference_puts_it(
    case: tuple[Cache, Cache, int, int, tuple[int, int]], limit: int
) -> None:
    source, target, first_token, tokens, heads = case
    source.kv.layout.check_compatible(target.kv.layout, "the target")
    plan = plan_copy(source.side, target.side, first_token=first_token, tokens=tokens, heads=heads)
    before, kept = source.memory(), target.memory()

    device = HostDevice()
    for layer in plan.layers:
        for chunk in plan.chunks((layer,), limit):
            device.copy(plan, chunk, source.kv.buffers, target.kv.buffers, stream=device.stream())
    found = target.memory()
    assert source.memory() == before

    for buffer, data in zip(target.kv.buffers, kept, strict=True):
        buffer.view[:] = data
    moved = 0
    for index, group in enumerate(source.kv.layout.groups):
        begin = max(first_token, source.blocks[index].start, target.blocks[index].start)
        for layer in group.layers:
            for half in range(group.halves):
                for token in range(begin, tokens):
                    for head in range(*(heads if group.kind != "mla" else (0, 1))):
                        there = source.head(layer, half, token, head)
                        target.head(layer, half, token, head)[:] = there
                        moved += len(there)
    assert target.memory() == found
    assert plan.total == moved
    source.kv.close()
    target.kv.close()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", [*FORMS, *LATENT_FORMS])
def test_each_form_is_one_that_a_cache_can_have(form: str, storage: str) -> None:
    axes, split, joined = {**FORMS, **LATENT_FORMS}[form]
    latent = form in LATENT_FORMS
    heads = 1 if latent else 2
    group = GroupLayout(
        layers=(0, 1, 2),
        blocks=4,
        block_size=3,
        heads=(0, heads),
        total_heads=heads,
        head_size=5,
        dtype="float16",
        axes=axes,
        split=split,
        kind="mla" if latent else "attention",
    )
    given, by_axes = tensors_of(group, storage, joined)
    cache = KVCache.from_tensors(CacheLayout(groups=(group,)), given)
    assert len(cache.buffers) == (3 * group.planes if storage in ("apart", "padded") else 1)
    for layer, wanted in enumerate(by_axes):
        found = cache.tensor(layer)
        for mine, theirs in zip(found if split else (found,), wanted, strict=True):
            assert (mine.data_ptr(), mine.shape, mine.stride()) == (
                theirs.data_ptr(),
                theirs.shape,
                theirs.stride(),
            )
            assert mine.shape[-1] * itemsize("float16") == group.head_bytes
    cache.close()
