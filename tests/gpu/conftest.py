"""What tests on a GPU share: one device here, and one other process with another on the same GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from remote import Other

from aiokv.testing.held import Holder


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    from aiokv.device.cuda import CudaDevice

    # What torch makes at its first use is not left behind by the test that happens to be first.
    torch.zeros(1, device="cuda:0").add_(1)
    torch.cuda.Stream(device="cuda:0")
    torch.cuda.synchronize()
    made = CudaDevice(0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()


@pytest.fixture(scope="session")
def the_holder(device) -> Iterator[Holder]:
    with Holder(device, most=4096) as holder:
        yield holder


@pytest.fixture
def holder(the_holder: Holder) -> Iterator[Holder]:
    """Holds streams; all are let go at the end of the test, whatever happens."""
    yield the_holder
    the_holder.release()
