"""Which benchmarks there are: the modules of ``aiokv.bench.suite``.

A module has ``GOALS``, the named figures that it gives, and ``run(report, options)``, which measures. It
may have ``missing() -> str``: what this machine lacks for it, empty if nothing, and ``draw(axes, rows)``,
which fills a panel. Its docstring's first line is its description. What a benchmark of the host measures on
a GPU is the module of the same name in ``aiokv.bench.suite.cuda``; those that need a GPU anyway have none
there.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiokv.bench import suite
from aiokv.bench.report import Goal, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DEVICES", "Benchmark", "Draw", "Options", "load", "names"]

#: Fills a panel with the rows of a benchmark.
Draw = Callable[["Axes", list[dict[str, Any]]], None]
#: Where the memory is that is moved, or the operations that are waited for.
DEVICES = ("host", "cuda")
#: Benchmarks that are of a GPU whatever device is asked for.
_OF_GPUS = frozenset({"copy", "gil", "pipe"})


@dataclass(frozen=True, slots=True)
class Options:
    """How to run."""

    #: Within a minute, to see that it works and the order of magnitude.
    quick: bool = False
    #: Measure other libraries, too, where they are installed.
    peers: bool = False
    #: Folder for profiles; empty for none.
    profiles: str = ""
    #: File with a trace of requests to replay; empty for one that is made from a seed.
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module of the suite."""

    name: str
    about: str
    goals: Mapping[str, Goal]
    #: What this machine lacks for it; empty if nothing.
    missing: Callable[[], str]
    run: Callable[[Report, Options], None]
    #: Fills a panel of the picture with its rows; None where it draws nothing of its own.
    draw: Draw | None = None


def names(device: str = "host") -> list[str]:
    """All benchmarks of a device, by name; those that are of a GPU alone are of the host's list, too."""
    if device == "host":
        return _within(suite.__path__)
    return sorted({*_within(import_module(f"{suite.__name__}.{device}").__path__), *_OF_GPUS})


def _within(path: Iterable[str]) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(path) if not module.ispkg)


def load(name: str, device: str = "host") -> Benchmark:
    """Import one.

    Raises:
        ModuleNotFoundError: There is none of this name, or none for this device.
    """
    place = suite.__name__ if device == "host" or name in _OF_GPUS else f"{suite.__name__}.{device}"
    module = import_module(f"{place}.{name}")
    about = (module.__doc__ or "").partition("\n")[0]
    missing, draw = getattr(module, "missing", str), getattr(module, "draw", None)
    return Benchmark(name, about, module.GOALS, missing, module.run, draw)
