from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def real() -> ModuleType:
    """The module ``real.py`` beside this file."""
    spec = importlib.util.spec_from_file_location("aiokv_real_vllm", Path(__file__).with_name("real.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
