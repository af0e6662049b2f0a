"""What tests on a GPU share: one device here, and one other process with another on the same GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from remote import Other


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    from aiokv.device.cuda import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()
