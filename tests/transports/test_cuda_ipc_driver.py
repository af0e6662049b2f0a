"""The calls of the CUDA driver, on a library of fakes: what is undone when one of them fails."""

from __future__ import annotations

import ctypes

import pytest

from aiokv.errors import DeviceError
from aiokv.transports.cuda_ipc_driver import CudaIpcDriver

BASE = 0x7000_0000


class Library:
    """Answers every call, and knows which were made."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        #: The device that memory is on.
        self.memory_of = 0

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            if name == "cuMemAlloc_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = BASE
            if name == "cuPointerGetAttribute":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = self.memory_of
            return 0

        return call


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def driver(library: Library) -> CudaIpcDriver:
    return CudaIpcDriver(0, library)


@pytest.mark.parametrize("fails", ["cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"])
def test_memory_that_could_not_be_filled_is_given_back(
    fails: str, library: Library, driver: CudaIpcDriver
) -> None:
    library.fails[fails] = 700
    with pytest.raises(DeviceError, match=rf"{fails}: unknown error \(700\)"):
        driver.allocate(b"nonce")
    assert library.calls.count("cuMemAlloc_v2") == library.calls.count("cuMemFree_v2") == 1


def test_the_threads_capture_mode_is_put_back_when_a_call_fails(
    library: Library, driver: CudaIpcDriver
) -> None:
    library.fails["cuMemGetAddressRange_v2"] = 1
    with pytest.raises(DeviceError):
        driver.find(BASE)
    assert library.calls.count("cuThreadExchangeStreamCaptureMode") == 2
    assert library.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_memory_of_the_device_itself_needs_no_peer_access(library: Library, driver: CudaIpcDriver) -> None:
    driver.reach(BASE)
    assert "cuCtxEnablePeerAccess" not in library.calls


@pytest.mark.parametrize("code", [0, 704])
def test_another_devices_memory_is_made_reachable(code: int, library: Library, driver: CudaIpcDriver) -> None:
    library.memory_of = 1
    library.fails["cuCtxEnablePeerAccess"] = code
    driver.reach(BASE)
    assert "cuCtxEnablePeerAccess" in library.calls
    retained = library.calls.count("cuDevicePrimaryCtxRetain")
    assert retained == library.calls.count("cuDevicePrimaryCtxRelease_v2") == 2


def test_another_devices_memory_that_is_out_of_reach_is_refused(
    library: Library, driver: CudaIpcDriver
) -> None:
    library.memory_of = 1
    library.fails["cuCtxEnablePeerAccess"] = 217
    with pytest.raises(DeviceError, match="memory of GPU 1 can't be reached from GPU 0"):
        driver.reach(BASE)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == library.calls.count(
        "cuDevicePrimaryCtxRelease_v2"
    )
