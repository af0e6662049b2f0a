"""Python, what aiokv is built on, GPUs and what drives them, and optional packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from aiokv.doctor.findings import Finding, missing, ok, weak

__all__ = ["EXTRAS", "extras", "gpu", "needed"]

#: PyPI's build of torch for Linux is the one for CUDA.
_TORCH = "pip install --force-reinstall --index-url https://pypi.org/simple torch"

#: The versions that the package takes.
_OLDEST, _NEWEST = (3, 11), (3, 13)

#: What aiokv is built on, by the name that it is imported by.
_PACKAGES = {"msgspec": "msgspec", "numpy": "numpy", "zmq": "pyzmq", "aiozmq": "aiozmq", "torch": "torch"}

#: Optional parts of the package, and what each brings, by the names of the projects and of their modules.
EXTRAS = {
    "metrics": {"prometheus-client": "prometheus_client"},
    "checksums": {"xxhash": "xxhash"},
    "bench": {"matplotlib": "matplotlib", "rich": "rich"},
    "examples": {
        "accelerate": "accelerate",
        "gguf": "gguf",
        "rich": "rich",
        "transformers": "transformers",
    },
}


def needed() -> Iterator[Finding]:
    """Python and the packages that aiokv depends on."""
    version = sys.version_info[:2]
    found = f"{sys.implementation.name} {sys.version.split()[0]}"
    if _OLDEST <= version <= _NEWEST:
        yield ok("needed", "python", found, required=True)
    else:
        mend = "uv venv --python 3.12, then uv pip install aiokv"
        yield missing("needed", "python", f"{found}; 3.11 to 3.13 work", mend, required=True)
    for module, project in _PACKAGES.items():
        yield _package(module, project)
    yield _curve()
    yield _uvloop()


def _package(module: str, project: str) -> Finding:
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken build raises anything
        mend = f"pip install --force-reinstall {project}"
        return missing("needed", project, f"can't be imported: {error!r}", mend, required=True)
    return ok("needed", project, _version(project), required=True)


def _version(project: str) -> str:
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return "there, of unknown version"


def _curve() -> Finding:
    mend = "pip install --force-reinstall --only-binary pyzmq pyzmq"
    try:
        import zmq
    except ImportError:
        return missing("needed", "zmq: curve", "there is no pyzmq", mend)
    if not zmq.has("curve"):
        return missing("needed", "zmq: curve", "libzmq was built without it: keys can't be used", mend)
    return ok("needed", "zmq: curve", f"libzmq {zmq.zmq_version()}")


def _uvloop() -> Finding:
    if sys.platform == "win32":
        return missing("needed", "uvloop", "not for Windows; asyncio's own loop is used")
    if find_spec("uvloop") is None:
        return weak("needed", "uvloop", "asyncio's own loop works, and is slower", "pip install uvloop")
    return ok("needed", "uvloop", _version("uvloop"))


def gpu(driver: Path = Path("/proc/driver/nvidia/version")) -> Iterator[Finding]:
    """GPUs, and what caches on them need.

    Args:
        driver: Is there where NVIDIA's driver is.
    """
    try:
        import torch
    except ImportError:
        yield missing("gpu", "cuda", "there is no torch")
        return
    build = torch.version.cuda
    if not torch.cuda.is_available():
        yield _no_cuda(torch.__version__, build, driver)
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield ok("gpu", "cuda", f"{build}; {', '.join(names)}")
    yield _cupy(build or "")
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield ok("gpu", "nccl", version)
    else:
        yield missing("gpu", "nccl", "torch was built without it", _TORCH)


def _no_cuda(version: str, build: str | None, driver: Path) -> Finding:
    if not driver.exists():
        found = "no driver of an NVIDIA GPU is seen: caches are in host memory"
        return missing("gpu", "cuda", found, "where there is a GPU: docker run --gpus all, or its driver")
    if build is None:
        return missing("gpu", "cuda", f"torch {version} is a build without CUDA", _TORCH)
    found = f"torch {version} is for CUDA {build} and finds no GPU that it can use"
    return missing("gpu", "cuda", found, "nvidia-smi says for which CUDA the driver is; install that torch")


def _cupy(build: str) -> Finding:
    extra = f"cuda{build.partition('.')[0]}"
    if find_spec("cupy") is None:
        return missing("gpu", "cupy", "not installed: no caches on a GPU", f"pip install 'aiokv[{extra}]'")
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - a build for another CUDA raises anything
        return missing("gpu", "cupy", f"doesn't work: {error!r}", f"pip install 'aiokv[{extra}]'")
    return ok("gpu", "cupy", str(cupy.__version__))


def extras() -> Iterator[Finding]:
    """Optional parts."""
    for extra, modules in EXTRAS.items():
        absent = [project for project, module in modules.items() if find_spec(module) is None]
        if absent:
            found = f"without {', '.join(absent)}"
            yield missing("extras", extra, found, f"pip install 'aiokv[{extra}]'")
        else:
            yield ok("extras", extra, ", ".join(f"{name} {_version(name)}" for name in modules))
