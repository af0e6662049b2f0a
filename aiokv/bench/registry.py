"""Which benchmarks there are: the modules of ``aiokv.bench.suite``.

A module has ``GOALS``, the named figures that it gives, and ``run(report, options)``, which measures. It
may have ``missing() -> str``: what this machine lacks for it, empty if nothing. Its docstring's first line
is its description.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from aiokv.bench import suite
from aiokv.bench.report import Goal, Report

__all__ = ["Benchmark", "Options", "load", "names"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run."""

    #: Within a minute, to see that it works and the order of magnitude.
    quick: bool = False
    #: Measure other libraries, too, where they are installed.
    peers: bool = False
    #: Folder for profiles; empty for none.
    profiles: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One module of the suite."""

    name: str
    about: str
    goals: Mapping[str, Goal]
    #: What this machine lacks for it; empty if nothing.
    missing: Callable[[], str]
    run: Callable[[Report, Options], None]


def names() -> list[str]:
    """All benchmarks, by name."""
    return sorted(module.name for module in pkgutil.iter_modules(suite.__path__) if not module.ispkg)


def load(name: str) -> Benchmark:
    """Import one.

    Raises:
        ModuleNotFoundError: There is none of this name.
    """
    module = import_module(f"{suite.__name__}.{name}")
    about = (module.__doc__ or "").partition("\n")[0]
    return Benchmark(name, about, module.GOALS, getattr(module, "missing", str), module.run)
