"""The examples are scripts, and what they share can be imported from their folder alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from serving.model import Model

EXAMPLES = Path(__file__).parents[2] / "examples"

if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="package")
def model() -> Iterator[Model]:
    """The tiny random model, computed in one thread, since it gains nothing from more."""
    from serving.model import load

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load("tiny-random")
    torch.set_num_threads(threads)
