"""What is said of libraries that are missing or too old, and of CUDA's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from aiokv.device.cudalibrary import CaptureMode, Cuda, DriverCalls, load, pending, sticky
from aiokv.errors import CapacityError, DeviceError
from aiokv.testing.fakecuda import FakeCuda, FakeError


def libraries(**versions: str | None) -> Callable[[str], ModuleType]:
    """Imports modules of these versions; one of None is missing."""
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=FakeError)
    driver = SimpleNamespace(CUDADriverError=FakeError)
    cuda = SimpleNamespace(runtime=runtime, driver=driver)
    built = versions.pop("built", "13.0")

    def imported(name: str) -> ModuleType:
        version = versions.get(name, "99.0")
        if version is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        module = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=built), cuda=cuda)
        return cast(ModuleType, module)

    return imported


def driver() -> DriverCalls:
    return cast(DriverCalls, SimpleNamespace(exchange=lambda word: 0))


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": None}, "need torch.*pip install torch"),
        ({"torch": "2.10.0"}, "torch 2.10.0 is too old, 2.11 is needed: pip install -U torch"),
        (
            {"torch": "2.12.0+cpu", "built": None},
            "torch 2.12.0\\+cpu was built without CUDA; pip install --f",
        ),
        ({"cupy": None}, "need cupy.*No module.*pip install 'aiokv\\[cuda13\\]'"),
        ({"cupy": None, "built": "12.8"}, "pip install 'aiokv\\[cuda12\\]'"),
        ({"cupy": "13.6.0"}, "cupy 13.6.0 is too old, 14.0 is needed: pip install 'aiokv\\[cuda13\\]'"),
    ],
)
def test_what_is_missing_is_named_with_what_mends_it(versions: dict[str, Any], said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        load(libraries(**versions), driver)


@pytest.mark.parametrize("versions", [{}, {"torch": "2.11.0+cu130", "cupy": "14.0.0rc1"}])
def test_what_is_new_enough_is_taken(versions: dict[str, Any]) -> None:
    assert isinstance(load(libraries(**versions), driver), Cuda)


def test_no_driver() -> None:
    with pytest.raises(DeviceError, match="no usable CUDA driver.*no-such-library"):
        load(libraries(), lambda: DriverCalls("no-such-library.so"))


def test_no_gpu() -> None:
    imported = libraries()
    imported("cupy").cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(DeviceError, match="no CUDA device"):
        load(imported, driver)


def test_errors_are_translated() -> None:
    cuda = FakeCuda().libraries()
    error = FakeError(2)
    found = cuda.translated(error, "so much")
    assert isinstance(found, CapacityError)
    assert found.__cause__ is error
    assert isinstance(cuda.translated(700, "a copy"), DeviceError)
    assert sticky(700)
    assert sticky(FakeError(719))
    assert not sticky(2)
    assert not sticky(ValueError())
    assert pending(600)
    assert not pending(0)


def test_capture_mode_is_changed_within_only_and_by_thread() -> None:
    modes: dict[int, int] = {}

    def exchange(reference: Any) -> int:
        word, thread = reference._obj, threading.get_ident()
        modes[thread], word.value = word.value, modes.get(thread, 0)
        return 0

    quiet = CaptureMode(cast(DriverCalls, SimpleNamespace(exchange=exchange)))
    mine = threading.get_ident()
    seen = []

    def elsewhere() -> None:
        with quiet:
            seen.append((modes[threading.get_ident()], modes[mine]))
        seen.append((modes[threading.get_ident()], modes[mine]))

    for _ in range(2):
        with quiet, quiet:
            assert modes[mine] == 1
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert modes[mine] == 1
        assert modes[mine] == 0
    assert seen == [(1, 1), (0, 1)] * 2
