"""Scattered fragments from a GPU to the host and back, alone and beside a model's matrix products.

The fragments lie anywhere on the GPU and one after another on the host, as a host tier keeps them. aiokv is
measured beside one DMA for each, all of them in one batch, a kernel that reaches through PCIe, and one DMA of
as many bytes that lie together: what PCIe gives. The clock runs from the first call to the last byte.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from aiokv.bench.cuda.dma import CONTIGUOUS, DIRECTIONS, OURS, Direction, Fragments, Memory, Ways
from aiokv.bench.cuda.gemm import Gemm
from aiokv.bench.cuda.gpu import Gpu, Named, missing
from aiokv.bench.figures import Spread, highest, over
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GOALS", "draw", "missing", "run"]

_NAMES = {4 << 10: "4k", 16 << 10: "16k", 64 << 10: "64k", 256 << 10: "256k", 2 << 20: "2m"}
_SHARES = {"d2h": 0.95, "h2d": 0.90}
GOALS = {
    **{
        f"copy.{direction}_{size}_over_pcie": Goal(share, "higher")
        for size in _NAMES.values()
        for direction, share in _SHARES.items()
    },
    "copy.gemm_slowdown": Goal(0.05, "lower"),
    "copy.decode_slowdown": Goal(0.10, "lower"),
}

_SEED = 5
#: Of the products, so that they last some tens of milliseconds.
_PRODUCTS = {"gemm": (8192, 1, 40), "decode": (64, 4, 1200)}
_ALONE = "alone"

Key = tuple[str, Direction]


def _timed(gpu: Gpu, go: Callable[[], None], stream: Named) -> tuple[float, float]:
    """Seconds until it is over, and those of them that the calls took."""
    began = time.perf_counter_ns()
    go()
    called = time.perf_counter_ns()
    gpu.runtime.streamSynchronize(stream.ptr)
    return (time.perf_counter_ns() - began) / 1e9, (called - began) / 1e9


async def _alone(
    report: Report, memory: Memory, size: int, rounds: int
) -> Mapping[Key, list[tuple[float, float]]]:
    """Each way by itself, once it was seen to move the bytes."""
    ways = Ways(memory, Fragments(memory, size, _SEED))
    measures: dict[Key, Callable[[], Awaitable[tuple[float, float]]]] = {}
    for name, way in ways.by_name.items():
        for direction in DIRECTIONS:
            ways.check(name, direction)
            measures[name, direction] = _as_awaited(
                partial(_timed, memory.gpu, partial(way, direction), ways.stream_of(name))
            )
    found = await alternate(rounds, measures)
    for name in ways.by_name:
        cells: dict[str, str | Spread] = {"fragments": _NAMES[size], "by": name}
        for direction in DIRECTIONS:
            took = found[name, direction]
            cells[f"{direction} GB/s"] = Spread.of(memory.nbytes / all_of / 1e9 for all_of, _ in took)
            cells[f"{direction} calls ms"] = Spread.of(calls * 1e3 for _, calls in took)
        report.row("scattered on the GPU, together on the host", cells)
    for direction in DIRECTIONS:
        # Shares of a rate: the other way round of the times.
        report.ratio(
            f"copy.{direction}_{_NAMES[size]}_over_pcie",
            over(
                [all_of for all_of, _ in found[CONTIGUOUS, direction]],
                [all_of for all_of, _ in found[OURS, direction]],
            ),
        )
    return found


def _as_awaited(measure: Callable[[], tuple[float, float]]) -> Callable[[], Awaitable[tuple[float, float]]]:
    async def measured() -> tuple[float, float]:
        return measure()

    return measured


async def _beside(
    report: Report, memory: Memory, kind: str, size: int, rounds: int
) -> dict[Direction, list[float]]:
    """How much slower products get beside each way; aiokv's figures, for each direction."""
    rows, weights, times = _PRODUCTS[kind]
    gemm = Gemm(memory.gpu, rows, weights=weights, times=times)
    ways = Ways(memory, Fragments(memory, size, _SEED))
    measures: dict[Key, Callable[[], Awaitable[tuple[float, float]]]] = {
        (_ALONE, "d2h"): _as_awaited(partial(gemm.run, None, memory.stream, 0))
    }
    for name, way in ways.by_name.items():
        for direction in DIRECTIONS:
            measures[name, direction] = _as_awaited(
                partial(gemm.run, partial(way, direction), ways.stream_of(name), memory.nbytes)
            )
    found = await alternate(rounds, measures)
    alone = [took for took, _ in found[_ALONE, "d2h"]]
    slower: dict[Key, list[float]] = {}
    for name, direction in measures:
        if name != _ALONE:
            took = [seconds for seconds, _ in found[name, direction]]
            slower[name, direction] = [ratio - 1 for ratio in over(took, alone)]
            report.row(
                "matrix products beside the copies",
                {
                    "products": kind,
                    "us each alone": Spread.of(seconds / times * 1e6 for seconds in alone),
                    "fragments": _NAMES[size],
                    "by": name,
                    "direction": direction,
                    "slower by %": Spread.of(ratio * 100 for ratio in slower[name, direction]),
                    "GB/s": Spread.of(rate / 1e9 for _, rate in found[name, direction]),
                },
            )
    return {direction: slower[OURS, direction] for direction in DIRECTIONS}


async def _run(report: Report, options: Options) -> None:
    nbytes, sizes, rounds = (64 << 20, [4 << 10, 64 << 10], 2) if options.quick else (256 << 20, [*_NAMES], 5)
    with closing(Gpu()) as gpu, closing(Memory(gpu, nbytes)) as memory:
        report.row("what aiokv's copy engine goes by", {"costs": str(gpu.device.costs)})
        for size in sizes:
            await _alone(report, memory, size, rounds)
        rounds = min(rounds, 3)
        for kind in _PRODUCTS:
            slower: dict[tuple[int, Direction], list[float]] = {}
            for size in sizes if options.quick else (4 << 10, 64 << 10):
                for direction, found in (await _beside(report, memory, kind, size, rounds)).items():
                    slower[size, direction] = found
            report.ratio(f"copy.{kind}_slowdown", highest(slower))
    if options.quick:
        report.leave_out([name for name in GOALS if name not in report.ratios], "not with --quick")


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))


def draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Rates over the size of fragments, to the host."""
    kept = [cells for cells in rows if "d2h GB/s" in cells]
    sizes = list(dict.fromkeys(cells["fragments"] for cells in kept))
    for name in dict.fromkeys(cells["by"] for cells in kept):
        own = [cells for cells in kept if cells["by"] == name]
        at = [sizes.index(cells["fragments"]) for cells in own]
        style = "o-" if name == "aiokv" else "o--"
        axes.plot(at, [cells["d2h GB/s"].median for cells in own], style, label=name)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("GB/s")
    axes.set_title("fragments scattered on the GPU, to the host")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
