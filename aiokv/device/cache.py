"""Registered KV tensors: a layout, where the bytes are, and the buffers that hold them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from aiokv.device.base import Buffer, Device
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.errors import BusyError, ClosedError, LayoutMismatch
from aiokv.proto.layout import CacheLayout, GroupLayout, itemsize
from aiokv.proto.placement import GroupPlacement, Placement

if TYPE_CHECKING:
    import torch

__all__ = ["Allocator", "KVCache"]


class Allocator(Device, Protocol):
    """A device that can make memory of its own kind."""

    def allocate(self, nbytes: int) -> Buffer:
        """New memory that stays until the buffer is closed.

        Raises:
            CapacityError: There isn't so much.
        """


class KVCache:
    """One rank's KV cache, registered: what engines transfer from and into.

    Use ``allocate`` for memory of aiokv's own, which other processes on the host can map, or
    ``from_tensors`` for tensors that exist. Close it after the engine that uses it; as a context
    manager it closes itself.

    Attributes:
        layout: What is in the cache.
        placement: Where, in byte offsets into ``buffers``.
        device: What copies within and out of it.
        buffers: The memory, in the placement's order.
    """

    def __init__(
        self,
        layout: CacheLayout,
        placement: Placement,
        device: Device,
        buffers: tuple[Buffer, ...],
        tensors: Sequence[tuple[torch.Tensor, ...]] = (),
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        placement.check(layout)
        self.layout = layout
        self.placement = placement
        self.device = device
        self.buffers = buffers
        self._tensors = dict(enumerate(tensors))
        #: Gives back what was made for this cache alone.
        self._on_close = on_close
        self._closed = False
        #: How many keep it open.
        self._users = 0
        self._kept: list[object] = []

    def __repr__(self) -> str:
        layers, blocks = self.layout.layers, "+".join(str(group.blocks) for group in self.layout.groups)
        size = sum(buffer.nbytes for buffer in self.buffers)
        state = " closed" if self._closed else ""
        return (
            f"<KVCache of {layers} layers, {blocks} blocks, {size} bytes in {len(self.buffers)} buffers, "
            f"{self.device.kind}{state}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @classmethod
    def allocate(cls, layout: CacheLayout, *, device: Allocator | None = None) -> KVCache:
        """A new zeroed cache, all layers in one buffer.

        Args:
            layout: What it is to hold.
            device: Where: a ``CudaDevice``, say; host memory by default.

        Raises:
            CapacityError: There isn't so much memory.
            DeviceError: The device failed.
        """
        device = device or HostDevice()
        placement = Placement.dense(layout)
        return cls(layout, placement, device, (device.allocate(placement.buffers[0]),))

    @classmethod
    def from_tensors(
        cls,
        layout: CacheLayout,
        tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        device: Device | None = None,
    ) -> KVCache:
        """Register an inference engine's tensors, which stay alive as long as the cache.

        Args:
            layout: What the tensors hold.
            tensors: For each layer, in the model's order, a tensor with the layout's axes, or
                a pair of K and V where the layout says split. Views are fine, padded and
                interleaved ones too (such as those of all layers into one storage), as long as
                a head's elements are contiguous. Where the axes end with ``sd``, K and V may be
                joined in the last axis, of twice the head size.
            device: What copies: a ``CudaDevice`` of the GPU that the tensors are on, which can serve
                several caches, or the host. By default one is made for where the tensors are; for a
                GPU that takes a second or more, blocks, and belongs to no loop.

        Raises:
            LayoutMismatch: A tensor isn't what the layout says, or is elsewhere than the device; the
                message names the layer.
            CapacityError: The GPU hasn't the memory that copies need.
            DeviceError: The GPU can't be used; the message says what mends it.
        """
        if len(tensors) != layout.layers:
            raise LayoutMismatch(f"{len(tensors)} layers of tensors for a layout of {layout.layers}")
        kept = [
            _planes(layer, layout.groups[layout.group_of(layer)], given)
            for layer, given in enumerate(tensors)
        ]
        where = _whereabouts(kept, device)
        registry = _Registry()
        groups = tuple(_place(group, kept, registry) for group in layout.groups)
        if device is not None:
            return cls._registered(layout, kept, groups, registry, device, None)
        if where == "cpu":
            return cls._registered(layout, kept, groups, registry, HostDevice(), None)
        from aiokv.device.cuda import CudaDevice

        own = CudaDevice(int(where.removeprefix("cuda:")))
        return cls._registered(layout, kept, groups, registry, own, own.close)

    @classmethod
    def _registered(
        cls,
        layout: CacheLayout,
        kept: Sequence[tuple[torch.Tensor, ...]],
        groups: tuple[GroupPlacement, ...],
        registry: _Registry,
        device: Device,
        on_close: Callable[[], None] | None,
    ) -> KVCache:
        buffers = registry.buffers(device)
        placement = Placement(buffers=tuple(buffer.nbytes for buffer in buffers), groups=groups)
        return cls(layout, placement, device, buffers, kept, on_close=on_close)

    def tensor(self, layer: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One layer's memory as a tensor in the layout's axes; K and V as a pair where split.

        Nothing is copied. A view keeps the memory mapped, also after ``close``.

        Raises:
            IndexError: There is no such layer.
            TypeError: The layer is no integer.
            ClosedError: The cache was closed.
        """
        if self._closed:
            raise ClosedError("this KV cache was closed")
        layer = operator.index(layer)
        if layer not in self._tensors:
            self._tensors[layer] = self._views(layer)
        planes = self._tensors[layer]
        return planes[0] if len(planes) == 1 else (planes[0], planes[1])

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """A context in which ``close`` is refused; an engine keeps its cache open while it is entered.

        Raises:
            ClosedError: The cache was closed.
        """
        if self._closed:
            raise ClosedError("this KV cache was closed")
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def keep(self, what: object) -> None:
        """Keep something alive for as long as this object is there."""
        self._kept.append(what)

    def close(self) -> None:
        """Give the memory back, or the tensors free. May be called twice.

        Raises:
            BusyError: An engine that uses it is open: its peers may be reading the memory.
        """
        if self._users:
            raise BusyError(f"{self!r} is in use; close the engine first")
        self._closed = True
        self._tensors.clear()
        for buffer in self.buffers:
            close = getattr(buffer, "close", None)
            if close is not None:
                close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _views(self, layer: int) -> tuple[torch.Tensor, ...]:
        import torch

        index = self.layout.group_of(layer)
        group, place = self.layout.groups[index], self.placement.groups[index]
        dtype: torch.dtype = getattr(torch, group.dtype)
        size = itemsize(group.dtype)
        by_axis = dict(zip("bsth", place.strides, strict=True))
        strides = [by_axis.get(axis, size) // size for axis in group.axes]
        planes = []
        for buffer, offset in place.layers[group.layers.index(layer)]:
            flat = _flat(self.buffers[buffer])
            flat = flat[: flat.numel() // size * size].view(dtype)
            planes.append(flat.as_strided(group.shape, strides, offset // size))
        return tuple(planes)


class _Registry:
    """The distinct storages behind tensors, numbered as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._storages: list[torch.UntypedStorage] = []

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Buffer number and byte offset of a tensor's first element."""
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._numbers:
            self._numbers[key] = len(self._storages)
            self._storages.append(storage)
        return self._numbers[key], tensor.data_ptr() - storage.data_ptr()

    def buffers(self, device: Device) -> tuple[Buffer, ...]:
        """One buffer for each storage, which it keeps alive."""
        import torch

        register = getattr(device, "register", None)
        if register is not None:
            return tuple(
                register(storage.data_ptr(), storage.nbytes(), storage) for storage in self._storages
            )

        empty = torch.empty(0, dtype=torch.uint8)
        return tuple(HostBuffer.from_tensor(empty.new_empty(0).set_(storage)) for storage in self._storages)


def _flat(buffer: Buffer) -> torch.Tensor:
    """A buffer as a tensor of bytes, which keeps its memory."""
    import torch

    made = getattr(buffer, "tensor", None)
    if made is not None:
        found: torch.Tensor = made()
        return found
    view: memoryview = buffer.view  # type: ignore[attr-defined]
    # Not torch.frombuffer: it lets go of the view at once, which could then be unmapped.
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))


def _whereabouts(tensors: Sequence[tuple[torch.Tensor, ...]], device: Device | None) -> str:
    """Where all tensors are, as torch names it, once they are known to be in one place, the device's."""
    found = str(tensors[0][0].device)
    if not found.startswith(("cpu", "cuda")):
        raise LayoutMismatch(f"layer 0: on {found}, not in host memory, nor on a GPU")
    wanted, why = found, "where layer 0 is"
    if device is not None:
        wanted, why = getattr(device, "place", "cpu"), "the device's"
    for layer, planes in enumerate(tensors):
        for tensor in planes:
            if str(tensor.device) != wanted:
                what = "in host memory" if wanted == "cpu" else f"on {wanted}"
                raise LayoutMismatch(f"layer {layer}: on {tensor.device}, not {what}, {why}")
    return found


def _place(
    group: GroupLayout, tensors: Sequence[tuple[torch.Tensor, ...]], registry: _Registry
) -> GroupPlacement:
    """Where the tensors of one group are, once they are known to be strided alike."""
    strides = _strides(group.layers[0], group, tensors[group.layers[0]][0])
    places: dict[tuple[int, int], int] = {}
    layers = []
    for layer in group.layers:
        place = []
        for tensor in tensors[layer]:
            own = _strides(layer, group, tensor)
            if own != strides:
                raise LayoutMismatch(
                    f"layer {layer}: byte strides {own} of b, s, t, h, but {strides} elsewhere in its group"
                )
            where = registry.locate(tensor)
            if where in places:
                raise LayoutMismatch(f"layer {layer}: its memory is also that of layer {places[where]}")
            places[where] = layer
            place.append(where)
        layers.append(tuple(place))
    return GroupPlacement(strides=strides, layers=tuple(layers))


def _planes(
    layer: int, group: GroupLayout, given: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """One layer's tensors, once they are known to be what the group says."""
    import torch

    planes = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    if len(planes) != group.planes or isinstance(given, torch.Tensor) == group.split:
        wanted = "a pair of K and V" if group.split else "one tensor"
        raise LayoutMismatch(f"layer {layer}: the layout wants {wanted}, got {len(planes)} tensors")
    if group.axes.endswith("sd"):
        joined = (*group.shape[:-2], 2 * group.head_size)
        planes = tuple(one.view(group.shape) if tuple(one.shape) == joined else one for one in planes)
    for tensor in planes:
        if tensor.dtype != getattr(torch, group.dtype):
            raise LayoutMismatch(f"layer {layer}: {tensor.dtype}, but the layout says {group.dtype}")
        if tuple(tensor.shape) != group.shape:
            raise LayoutMismatch(
                f"layer {layer}: shape {tuple(tensor.shape)}, but {group.shape} in the layout ({group.axes})"
            )
    return planes


def _strides(layer: int, group: GroupLayout, tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Byte strides of b, s, t, h; those of axes with a single step are as good as 0."""
    size = itemsize(group.dtype)
    strides = {
        axis: step * size if count > 1 else 0
        for axis, count, step in zip(group.axes, group.shape, tensor.stride(), strict=True)
    }
    if group.head_size > 1 and strides["d"] != size:
        raise LayoutMismatch(f"layer {layer}: the elements of a head are not contiguous")
    span = group.head_bytes
    counts = dict(zip(group.axes, group.shape, strict=True))
    for axis in sorted(group.axes[:-1], key=lambda axis: strides[axis]):
        if counts[axis] > 1:
            if strides[axis] < span:
                raise LayoutMismatch(f"layer {layer}: elements overlap along axis {axis}")
            span += (counts[axis] - 1) * strides[axis]
    return strides["b"], strides.get("s", 0), strides["t"], strides.get("h", 0)
