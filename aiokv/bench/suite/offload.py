"""The host tier: its index, policies on a trace, requests that share a load, and when blocks are free again.

Nothing here needs a GPU: copies that a GPU would make are played, and take as long as over a bus of 50 GB/s.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import uvloop

from aiokv.bench.figures import Spread, over, quantile
from aiokv.bench.offload.played import PlayedDevice
from aiokv.bench.offload.replay import optimum, replayed
from aiokv.bench.offload.table import measure
from aiokv.bench.offload.tiers import alone, at_once, lags, layout_of, opened
from aiokv.bench.offload.traces import conversations, distinct, read
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report

__all__ = ["GOALS", "run"]

GOALS = {
    "offload.policy_us_per_key": Goal(3, "lower"),
    "offload.convoy": Goal(1.2, "lower"),
    "offload.release_lag_us": Goal(200, "lower"),
}

_SEED = 11
_KEYS = 1_000_000
#: Of the distinct blocks of the trace.
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
_REQUESTS = 50
#: 4k tokens in blocks of 16.
_PREFIX = 256
#: Of a design that hears of copies once a step.
_STEP_S = 0.030


def _table(report: Report, rounds: int) -> None:
    for policy in ("lru", "arc"):
        found = list(measure(policy, _KEYS, rounds))
        report.row(
            "the index with a million keys, us of CPU a key",
            {
                "policy": policy,
                **{
                    name: Spread.of(costs[name] for costs in found)
                    for name in ("miss", "store and evict", "hit", "all")
                },
                "bytes a key": found[0]["memory"],
            },
        )
        if policy == "lru":
            report.ratio("offload.policy_us_per_key", [costs["all"] for costs in found])


def _policies(report: Report, options: Options) -> None:
    if options.trace:
        trace, name = read(Path(options.trace)), Path(options.trace).name
    else:
        trace, name = conversations(_SEED, 1_000 if options.quick else 6_000), "conversations"
    blocks = distinct(trace)
    for share in _SHARES:
        capacity = max(1, int(blocks * share))
        cells: dict[str, float | int | str] = {"trace": name, "capacity": capacity, "of blocks": share}
        for policy in ("lru", "arc"):
            began = time.thread_time_ns()
            cells[f"{policy} hits %"] = 100 * replayed(trace, policy, capacity)
            spent = time.thread_time_ns() - began
            cells[f"{policy} us a block"] = spent / 1e3 / sum(map(len, trace))
        cells["optimum %"] = 100 * optimum(trace, capacity)
        report.row("blocks found, by policy and capacity", cells)


async def _convoy(report: Report, rounds: int) -> None:
    """Played copies: how much longer the last of fifty waits than one alone."""
    layout, prefix = layout_of(2 * _PREFIX, layers=32), list(range(_PREFIX))
    hashes = [f"{index:064}" for index in prefix]
    blocks = list(range(_PREFIX, 2 * _PREFIX))
    one, last = [], []
    async with opened(layout, PlayedDevice(50.0), _PREFIX) as tier:
        await tier.store(hashes, prefix)
        for number in range(rounds + 1):
            first = await alone(tier, hashes, blocks)
            found = await at_once(tier, hashes, [blocks] * _REQUESTS)
            if number:
                one.append(first)
                last.append(found)
    ratios = over(last, one)
    report.row(
        f"{_REQUESTS} requests for one prefix of {_PREFIX * 16} tokens, at 50 GB/s",
        {
            "one alone ms": Spread.of(seconds * 1e3 for seconds in one),
            "the last of them ms": Spread.of(seconds * 1e3 for seconds in last),
            "if each waited for the one before ms": _REQUESTS * median(one) * 1e3,
        },
    )
    report.ratio("offload.convoy", ratios)


async def _release(report: Report, count: int) -> None:
    ours, theirs = await lags(count, _STEP_S)
    ours.sort()
    theirs.sort()
    for name, found in (("at the copy's event", ours), ("at the next step of 30 ms", theirs)):
        report.row(
            "from the end of the copy until its blocks are free",
            {
                "freed": name,
                "p50 us": quantile(found, 0.5) * 1e6,
                "p99 us": quantile(found, 0.99) * 1e6,
            },
        )
    parts = [sorted(ours[start::4]) for start in range(4)]
    report.ratio("offload.release_lag_us", [quantile(part, 0.99) * 1e6 for part in parts])


async def _copies(report: Report, rounds: int, share: float) -> None:
    """Real copies within the host's memory: put and get beside plain ones of as many bytes.

    Args:
        report: Is told.
        rounds: How often.
        share: Of the blocks that get a checksum.
    """
    layout, count = layout_of(2 * _PREFIX, layers=8), _PREFIX
    size = sum(group.block_bytes * len(group.layers) for group in layout.groups) * count
    there, back, plain = [], [], []
    source, target = bytearray(size), bytearray(size)
    async with opened(layout, None, count, checksums=share) as tier:
        for _ in range(rounds + 1):
            await tier.reset()
            began = time.perf_counter()
            await tier.store(range(count), list(range(count)))
            stored = time.perf_counter()
            await alone(tier, range(count), list(range(count, 2 * count)))
            loaded = time.perf_counter()
            memoryview(target)[:] = source
            there.append(size / (stored - began) / 1e9)
            back.append(size / (loaded - stored) / 1e9)
            plain.append(size / (time.perf_counter() - loaded) / 1e9)
    report.row(
        "within the host's memory, GB/s",
        {
            "MiB": size >> 20,
            "checksums %": share * 100,
            "put": Spread.of(there[1:]),
            "get": Spread.of(back[1:]),
            "plain copy": Spread.of(plain[1:]),
        },
    )


def run(report: Report, options: Options) -> None:
    """Measure."""
    _table(report, 3 if options.quick else 7)
    _policies(report, options)
    uvloop.run(_convoy(report, 5 if options.quick else 15))
    uvloop.run(_release(report, 400 if options.quick else 2000))
    for share in (0.0, 0.01, 1.0):
        uvloop.run(_copies(report, 3 if options.quick else 7, share))
