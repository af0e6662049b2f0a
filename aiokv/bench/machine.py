"""What a run ran on, as far as it explains its figures."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import aiokv

__all__ = ["describe"]

#: Packages whose version can matter.
_PACKAGES = ("aiozmq", "cupy-cuda12x", "cupy-cuda13x", "msgspec", "numpy", "pyzmq", "torch", "uvloop")


def describe() -> dict[str, Any]:
    """CPU, GPUs, memory, versions, and how busy the machine was before the run."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(_first("/proc/meminfo", "MemTotal").split()[0] or 0) / 2**20, 1),
        "gpus": _gpus(),
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {sys.version.split()[0]}",
        "aiokv": aiokv.__version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _first(path: str, key: str) -> str:
    """What the first line for a key says; "0" where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return "0"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "0")


def _gpus() -> list[str]:
    """Names of NVIDIA GPUs, without bringing CUDA up."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_first(str(path), "Model") for path in found]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
