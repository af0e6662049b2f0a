"""Host buffers: where they come from, and what becomes of them. The device passes the conformance suite."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from aiokv.device.base import Buffer
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.errors import CapacityError, ClosedError, DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Chunk, CopyPlan, GroupBlocks, Side, plan_copy

linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:aiokv")


# -- allocate and map -------------------------------------------------------------------------------


def test_allocated_memory_is_zeroed_aligned_and_writable() -> None:
    buffer = HostBuffer.allocate(10_000)
    assert buffer.nbytes == len(buffer.view) == 10_000
    assert buffer.address % mmap.PAGESIZE == 0
    assert bytes(buffer.view) == bytes(10_000)
    buffer.view[9_999:] = b"x"
    assert buffer.view[9_999] == ord("x")
    assert isinstance(buffer, Buffer)
    buffer.close()


@linux
def test_allocated_memory_is_sealed_and_not_inherited() -> None:
    buffer = HostBuffer.allocate(mmap.PAGESIZE)
    assert buffer.fd is not None
    assert fcntl.fcntl(buffer.fd, fcntl.F_GET_SEALS) == (
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10  # F_SEAL_FUTURE_WRITE
    )
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.fd, mmap.PAGESIZE)  # for writing
    with pytest.raises(PermissionError):
        os.pwrite(buffer.fd, b"x", 0)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, size)
    assert not os.get_inheritable(buffer.fd)
    assert os.fstat(buffer.fd).st_blocks * 512 >= mmap.PAGESIZE
    buffer.close()


@linux
def test_another_mapping_of_the_descriptor_sees_what_is_written() -> None:
    buffer = HostBuffer.allocate(100)
    assert buffer.fd is not None
    fd = os.dup(buffer.fd)
    reader = HostBuffer.map(fd, 100)
    os.close(fd)
    buffer.view[:3] = b"abc"
    assert bytes(reader.view[:3]) == b"abc"
    assert reader.view.readonly
    assert reader.fd is None
    buffer.close()
    assert bytes(reader.view[:3]) == b"abc"
    reader.close()


@linux
def test_a_descriptor_shorter_than_its_mapping_is_refused() -> None:
    buffer = HostBuffer.allocate(100)
    assert buffer.fd is not None
    for size in (101, 0, -1):
        with pytest.raises(ValueError):
            HostBuffer.map(buffer.fd, size)
    buffer.close()
    with pytest.raises(OSError):
        HostBuffer.map(9999, 100)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        HostBuffer.allocate(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 80])
def test_memory_that_is_not_there_is_refused_by_size(nbytes: int) -> None:
    with pytest.raises(CapacityError, match=f"^{nbytes} bytes") as caught:
        HostBuffer.allocate(nbytes)
    assert isinstance(caught.value, MemoryError)


@linux
@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create"])
def test_a_refusal_by_the_system_leaves_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CapacityError, match=r"^4096 bytes.*No space left") as caught:
        HostBuffer.allocate(4096)
    assert isinstance(caught.value.__cause__, OSError)


def test_without_memfd_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    buffer = HostBuffer.allocate(5000)
    assert buffer.fd is None
    assert bytes(buffer.view) == bytes(5000)
    buffer.view[:] = b"y" * 5000
    buffer.close()
    monkeypatch.setattr(mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOMEM, "no memory")))
    with pytest.raises(CapacityError, match=r"^5000 bytes.*no memory"):
        HostBuffer.allocate(5000)


# -- close ------------------------------------------------------------------------------------------


def test_a_closed_buffer_has_no_view() -> None:
    buffer = HostBuffer.allocate(100)
    view = buffer.view
    buffer.close()
    buffer.close()
    assert buffer.fd is None
    assert (buffer.nbytes, "closed" in repr(buffer)) == (100, True)
    with pytest.raises(ClosedError):
        _ = buffer.view
    with pytest.raises(ValueError, match="released"):
        view[0]


@linux
def test_memory_that_is_looked_at_is_unmapped_with_the_last_look() -> None:
    buffer = HostBuffer.allocate(100)
    fd = buffer.fd
    assert fd is not None
    buffer.view[:1] = b"z"
    array, slices = np.frombuffer(buffer.view, dtype=np.uint8), buffer.view[:10]
    buffer.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert (array[0], slices[0], mappings()) == (ord("z"), ord("z"), 1)
    del array
    assert (slices[0], mappings()) == (ord("z"), 1)
    del slices
    gc.collect()
    assert mappings() == 0


@linux
def test_a_forgotten_buffer_is_given_back_with_a_warning() -> None:
    held = [HostBuffer.allocate(100)]
    with pytest.warns(ResourceWarning, match="unclosed file"):
        held.clear()
    assert mappings() == 0


# -- tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_tensor_is_borrowed_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros((3, 5), dtype=dtype)
    buffer = HostBuffer.from_tensor(tensor)
    assert (buffer.address, buffer.nbytes) == (tensor.data_ptr(), tensor.nbytes)
    assert buffer.fd is None
    buffer.view[-1:] = b"\x38"
    assert tensor.view(torch.uint8).flatten()[-1] == 0x38
    buffer.close()


def test_a_borrowed_tensor_lives_until_the_buffer_is_closed() -> None:
    tensor = torch.ones(100, requires_grad=True)
    gone = weakref.ref(tensor)
    buffer = HostBuffer.from_tensor(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    buffer.close()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.zeros(4, 6).T, "contiguous"), (torch.zeros(3, device="meta"), "on meta, not in host memory")],
)
def test_tensors_that_cannot_be_borrowed_are_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostBuffer.from_tensor(tensor)


def test_torch_is_imported_only_when_a_tensor_is_met() -> None:
    code = (
        "import sys, aiokv.device.host as host, aiokv.device.cache, aiokv.proto.plan\n"
        "host.HostBuffer.allocate(1).close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- the device -------------------------------------------------------------------------------------

LAYOUT = CacheLayout.attention(layers=1, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16")


def planned() -> tuple[CopyPlan, Chunk, int]:
    placement = Placement.dense(LAYOUT)
    side = Side(LAYOUT, placement, (GroupBlocks(0, np.array([5, 2], dtype=np.int64)),))
    plan = plan_copy(side, side, first_token=0, tokens=8, heads=(0, 2))
    return plan, next(plan.chunks((0,), 1 << 20)), placement.buffers[0]


def test_events_are_done_at_once() -> None:
    device = HostDevice()
    stream, other = device.stream(), device.adopt(None)
    assert stream.record() is other.record()
    assert stream.record().done()
    stream.wait(other.record())
    assert (device.kind, device.budget_s) == ("host", 0.5e-3)


def test_a_host_stream_cannot_wait_for_what_is_not_done() -> None:
    class Pending:
        def done(self) -> bool:
            return False

    with pytest.raises(DeviceError, match="isn't done"):
        HostDevice().stream().wait(Pending())


@pytest.mark.parametrize(
    ("fault", "which"),
    [
        *(
            (fault, which)
            for fault in ("closed", "short", "elsewhere")
            for which in ("source", "destination")
        ),
        ("read-only", "destination"),
        ("chunk", "source"),
    ],
)
def test_a_copy_that_cannot_be_done_touches_nothing(fault: str, which: str) -> None:
    plan, chunk, nbytes = planned()
    good, bad = HostBuffer.allocate(nbytes), HostBuffer.allocate(nbytes)
    good.view[:] = b"g" * nbytes
    buffer: Buffer = bad
    if fault == "closed":
        bad.close()
    elif fault == "short":
        bad.close()
        buffer = bad = HostBuffer.allocate(600)  # the first of the two blocks would fit
    elif fault == "read-only":
        bad.close()
        buffer = bad = HostBuffer(memoryview(bytes(nbytes)), owner=None)
    elif fault == "chunk":
        chunk = chunk._replace(layer=7)
    else:

        class Elsewhere:
            address = 0
            nbytes = 1 << 30

        buffer = Elsewhere()
    src, dst = (buffer, good) if which == "source" else (good, buffer)
    device = HostDevice()
    with pytest.raises(DeviceError, match="can't be copied on the host") as caught:
        device.copy(plan, chunk, [src], [dst], stream=device.stream())
    assert caught.value.__cause__ is not None
    assert bytes(good.view) == b"g" * nbytes
    if fault == "short":
        assert bytes(bad.view) == bytes(600)
    good.close()
    bad.close()


def test_the_device_makes_memory() -> None:
    buffer = HostDevice().allocate(64)
    assert buffer.nbytes == 64
    buffer.close()
