"""What a block id means in bytes.

``CacheLayout`` says what is in the cache: for each KV cache group its layers, blocks, heads
and element type, and in which order a layer's tensor keeps its axes. Where they are in memory is said
by a ``Placement``.

vLLM's FlashAttention cache is ``sbthd``, FlashInfer's NHD ``bsthd`` and HND ``bshtd``; K and V joined in
the last axis, as vLLM keeps them on CPUs, are ``bhtsd``: a last axis of twice the head size is two axes.
The letters are explained at ``GroupLayout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from aiokv.errors import LayoutMismatch
from aiokv.proto.fields import flag, integer, integers, octets, settle, text

__all__ = ["MOST_LAYERS", "CacheLayout", "GroupLayout", "Kind", "itemsize"]

Kind = Literal["attention", "window", "mla", "state"]
KINDS: tuple[Kind, ...] = ("attention", "window", "mla", "state")

#: Bytes of one element, for the element types that KV caches are kept in.
ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

_AXES = "bsthd"

#: Layers of one cache at most: messages name them by a bitmap of at most 1024 bytes.
MOST_LAYERS = 8192


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``, a torch name without its prefix (``"bfloat16"``).

    Raises:
        ValueError: KV isn't kept in such elements.
    """
    try:
        return ITEMSIZES[dtype]
    except KeyError:
        known = ", ".join(sorted(ITEMSIZES))
        raise ValueError(f"unknown dtype {dtype!r}; known are {known}") from None


class GroupLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One KV cache group: layers that share block ids and keep the same kind of state.

    ``axes`` is the order in which a layer's tensor keeps its axes, from the outermost: ``b`` block, ``s`` K
    and V, ``t`` token within the block, ``h`` KV head of this rank, ``d`` element of the head, which is last
    and contiguous. NHD is ``...thd``, HND ``...htd``; ``s`` stands wherever K and V are stacked, and is
    absent where they are two tensors (``split``) or where there is one latent vector in their place (MLA).

    Integers may be of any type that has ``__index__``; they are kept as Python's.

    Attributes:
        layers: Model-wide indexes of the layers of this group, ascending.
        blocks: Number of blocks that this rank has memory for, less than 2**32.
        block_size: Tokens per block.
        heads: Half-open range of the model's KV heads that this rank keeps.
        total_heads: KV heads of the model, over all ranks; 1 for MLA, whose latent vector every rank keeps.
        head_size: Elements per head and token (of K alone, where K and V are two).
        dtype: Element type, a torch name without its prefix (``"bfloat16"``).
        axes: Order of the axes of a layer's tensor, as above.
        split: K and V are two tensors; then ``axes`` has no ``s``.
        kind: ``"attention"``, ``"window"`` (only the last tokens are kept), ``"mla"`` or ``"state"`` (one
            state for a whole block, which moves whole).
        window: How many of the last tokens the next one needs, for the kind ``"window"``; else 0.

    Raises:
        TypeError: A field is of another type; True and False are no integers.
        ValueError: No cache can be so.
    """

    layers: tuple[int, ...]
    blocks: int
    block_size: int
    heads: tuple[int, int]
    total_heads: int
    head_size: int
    dtype: str
    axes: str = "sbthd"
    split: bool = False
    kind: Kind = "attention"
    window: int = 0

    def __post_init__(self) -> None:
        """Refuse what no cache can be; what a peer sends passes through here too."""
        numbers = ("blocks", "block_size", "total_heads", "head_size", "window")
        settle(
            self,
            layers=integers(self.layers, "layers"),
            heads=integers(self.heads, "heads", 2),
            dtype=text(self.dtype, "dtype"),
            axes=text(self.axes, "axes"),
            split=flag(self.split, "split"),
            kind=text(self.kind, "kind"),
            **{name: integer(getattr(self, name), name) for name in numbers},
        )
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be ascending, unique and not negative: {self.layers}")
        for name in numbers[:-1]:
            if not 0 < getattr(self, name) < 2**32:
                raise ValueError(f"{name} must be positive and less than 2**32, got {getattr(self, name)}")
        first, last = self.heads
        if not 0 <= first < last <= self.total_heads:
            raise ValueError(f"heads {self.heads} don't lie in 0..{self.total_heads}")
        itemsize(self.dtype)
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; known are {', '.join(KINDS)}")
        if not (0 < self.window < 2**48 if self.kind == "window" else self.window == 0):
            raise ValueError(f"window {self.window}: positive for the kind 'window' and 0 for any other")
        self._check_axes()
        if self.kind == "mla" and (self.halves, self.total_heads) != (1, 1):
            raise ValueError("MLA keeps one latent vector: one head, no s in axes, and no split")

    def _check_axes(self) -> None:
        axes = set(self.axes)
        if len(axes) != len(self.axes) or not axes <= set(_AXES) or not {"b", "t", "d"} <= axes:
            raise ValueError(f"axes {self.axes!r} must name b, t, d once, and s, h at most once")
        if not self.axes.endswith("d"):
            raise ValueError(f"axes {self.axes!r}: d must be the last axis, so that a head is contiguous")
        if "h" not in axes and self.head_count != 1:
            raise ValueError(f"axes {self.axes!r} have no h, but there are {self.head_count} heads")
        if self.split and "s" in axes:
            raise ValueError(f"axes {self.axes!r} have an s, but K and V are said to be split")

    @property
    def head_count(self) -> int:
        """KV heads that this rank keeps."""
        return self.heads[1] - self.heads[0]

    @property
    def planes(self) -> int:
        """Tensors per layer: 2 where K and V are split, else 1."""
        return 2 if self.split else 1

    @property
    def halves(self) -> int:
        """2 where the group keeps K and V, 1 where it keeps one latent vector (MLA, state)."""
        return 2 if self.split or "s" in self.axes else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one of a layer's tensors, in ``axes`` order."""
        sizes = {
            "b": self.blocks,
            "s": 2,
            "t": self.block_size,
            "h": self.head_count,
            "d": self.head_size,
        }
        return tuple(sizes[axis] for axis in self.axes)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, of K alone."""
        return self.head_size * itemsize(self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer on this rank, K and V together."""
        return self.halves * self.head_count * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in one layer on this rank, K and V together."""
        return self.token_bytes * self.block_size

    def dense_strides(self) -> tuple[int, int, int, int]:
        """Byte strides of b, s, t, h (0 where absent) of a contiguous tensor in ``axes`` order."""
        strides: dict[str, int] = {}
        step = itemsize(self.dtype)
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            strides[axis] = step
            step *= size
        return strides["b"], strides.get("s", 0), strides["t"], strides.get("h", 0)


class CacheLayout(msgspec.Struct, frozen=True, array_like=True):
    """What a block id means, for every KV cache group of one rank's cache.

    Attributes:
        groups: The groups; their layers together are 0..n-1, each in one group.
        model: The caller's fingerprint of the model (weights, tokenizer, quantization), at most 256 bytes,
            compared for equality.

    Raises:
        TypeError: A field is of another type.
        ValueError: Layers are missing, in two groups or too many (``MOST_LAYERS``), or the fingerprint is
            too long.
    """

    groups: tuple[GroupLayout, ...]
    model: bytes = b""

    def __post_init__(self) -> None:
        """Refuse overlapping groups and absurd fingerprints."""
        if not isinstance(self.groups, list | tuple):
            raise TypeError(f"groups must be a tuple of GroupLayout, not {self.groups!r:.80}")
        for group in self.groups:
            if not isinstance(group, GroupLayout):
                raise TypeError(f"groups must be a tuple of GroupLayout, not of {group!r:.80}")
        settle(self, groups=tuple(self.groups), model=octets(self.model, "model"))
        if not self.groups:
            raise ValueError("a cache layout needs at least one group")
        if len(self.model) > 256:
            raise ValueError("the model fingerprint is limited to 256 bytes; hash it")
        layers = [layer for group in self.groups for layer in group.layers]
        if sorted(layers) != list(range(len(layers))):
            raise ValueError("the groups' layers must together be 0..n-1, each once")
        if len(layers) > MOST_LAYERS:
            raise ValueError(f"{len(layers)} layers; a cache has at most {MOST_LAYERS}")

    @classmethod
    def attention(
        cls,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        heads: int,
        head_size: int,
        dtype: str,
        model: bytes = b"",
        axes: str = "sbthd",
        split: bool = False,
        rank_heads: tuple[int, int] | None = None,
    ) -> CacheLayout:
        """A model whose layers all use full attention, as one group.

        Args:
            layers: Number of layers.
            blocks: Number of blocks of this rank.
            block_size: Tokens per block.
            heads: KV heads of the whole model.
            head_size: Elements per head.
            dtype: Torch name of the element type, without its prefix.
            model: The caller's fingerprint, compared for equality between peers.
            axes: Order of a layer's axes; see ``GroupLayout``.
            split: K and V are two tensors; ``axes`` then has no ``s``.
            rank_heads: Half-open range of heads that this rank keeps; all by default.

        Raises:
            TypeError: An argument is of another type.
            ValueError: No cache can be so.
        """
        group = GroupLayout(
            layers=_numbered(layers),
            blocks=blocks,
            block_size=block_size,
            heads=rank_heads or (0, heads),
            total_heads=heads,
            head_size=head_size,
            dtype=dtype,
            axes=axes,
            split=split,
        )
        return cls(groups=(group,), model=model)

    @classmethod
    def latent(
        cls,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        latent_size: int,
        dtype: str,
        model: bytes = b"",
        axes: str = "btd",
    ) -> CacheLayout:
        """A model with multi-head latent attention (MLA), as one group.

        One latent vector for each token stands for K and V of all heads. Under tensor parallelism every
        rank keeps all of it: ranks are copies of each other, and any one of them serves a consumer.

        Args:
            layers: Number of layers.
            blocks: Number of blocks of this rank.
            block_size: Tokens per block.
            latent_size: Elements of the vector, with the part that carries the position: 512 + 64 for
                DeepSeek's models.
            dtype: Torch name of the element type, without its prefix.
            model: The caller's fingerprint, compared for equality between peers.
            axes: Order of a layer's axes; with an ``h`` where the tensor has an axis for the one head.

        Raises:
            TypeError: An argument is of another type.
            ValueError: No cache can be so.
        """
        group = GroupLayout(
            layers=_numbered(layers),
            blocks=blocks,
            block_size=block_size,
            heads=(0, 1),
            total_heads=1,
            head_size=latent_size,
            dtype=dtype,
            axes=axes,
            kind="mla",
        )
        return cls(groups=(group,), model=model)

    @property
    def layers(self) -> int:
        """Number of layers, over all groups."""
        return sum(len(group.layers) for group in self.groups)

    def group_of(self, layer: int) -> int:
        """Index of the group that ``layer`` belongs to.

        Raises:
            IndexError: There is no such layer.
        """
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index
        raise IndexError(f"layer {layer} is not one of 0..{self.layers - 1}")

    def differences(self, other: CacheLayout) -> Iterator[str]:
        """What keeps ``other`` from holding the same KV, one line each; nothing if it can.

        The number of blocks, the block size, the axis order, K and V split or not, and the
        range of heads may differ: a copy plan bridges those.
        """
        if self == other:
            return
        if self.model != other.model:
            yield f"model fingerprint {self.model.hex() or 'empty'} against {other.model.hex() or 'empty'}"
        if len(self.groups) != len(other.groups):
            yield f"{len(self.groups)} KV cache groups against {len(other.groups)}"
            return
        for index, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=True)):
            for name in ("kind", "layers", "total_heads", "head_size", "dtype", "window", "halves"):
                ours, others = getattr(mine, name), getattr(theirs, name)
                if ours == others:
                    continue
                if name != "layers":
                    yield f"group {index}: {name} {ours} against {others}"
                elif len(ours) != len(others):
                    yield f"group {index}: {len(ours)} layers against {len(others)}"
                else:
                    moved = next(pair for pair in zip(ours, others, strict=True) if pair[0] != pair[1])
                    yield f"group {index}: layer {moved[0]} where the other has layer {moved[1]}"

    def check_compatible(self, other: CacheLayout, who: str) -> None:
        """Do nothing where ``other``, the cache of ``who``, can hold the same KV.

        Raises:
            LayoutMismatch: It can't; the message names every difference.
        """
        found = list(self.differences(other))
        if found:
            raise LayoutMismatch(f"this cache and that of {who} differ: " + "; ".join(found))


def _numbered(layers: int) -> tuple[int, ...]:
    """Indexes of all layers of a model with one group."""
    count = integer(layers, "layers")
    if not 0 < count <= MOST_LAYERS:
        raise ValueError(f"layers must be from 1 to {MOST_LAYERS}, got {count}")
    return tuple(range(count))
