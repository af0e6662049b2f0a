"""Benchmarks of a GPU, as far as can be seen without one: what they say is missing, and what they reckon."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rich", reason="the benchmarks need the extra: pip install 'aiokv[bench]'")

from aiokv.bench.__main__ import main
from aiokv.bench.cuda.clock import Reading, host_times
from aiokv.bench.cuda.llama import block_ids, layout_of, token_bytes
from aiokv.bench.cuda.pipes import Stages
from aiokv.bench.cuda.plans import plan_of, side_of
from aiokv.bench.cuda.traffic import CountingSelector, LoopThread, Moved
from aiokv.bench.figures import Spread
from aiokv.bench.registry import load, names
from aiokv.bench.suite.cuda.completion import _poll_us

DOCS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
ON_A_GPU = names("cuda")


def test_what_there_is_on_a_gpu() -> None:
    assert {"completion", "copy", "gil", "pipe", "transfer"} <= set(ON_A_GPU)
    assert set(ON_A_GPU) <= set(names())
    with pytest.raises(ModuleNotFoundError):
        load("latency", "cuda")


@pytest.mark.parametrize("name", ON_A_GPU)
def test_each_figure_is_in_the_docs(name: str) -> None:
    benchmark = load(name, "cuda")
    assert benchmark.about
    for figure in benchmark.goals:
        assert f"`{figure}`" in DOCS
        assert figure.startswith(f"{name}.")


@pytest.mark.parametrize("name", ON_A_GPU)
@pytest.mark.timeout(150)
def test_it_runs_or_says_what_is_missing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert main([name, "--device", "cuda", "--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    benchmark = load(name, "cuda")
    assert {*found["ratios"], *found["absent"]} == set(benchmark.goals)
    if missing := benchmark.missing():
        assert set(found["absent"].values()) == ({missing} if benchmark.goals else set())
        assert "pip install" in missing or "CUDA" in missing
    else:
        assert found["rows"]


def test_a_device_that_a_benchmark_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", "--device", "cuda"])
    assert "scale has no --device cuda" in capsys.readouterr().err


def test_the_gpus_time_by_the_hosts_clock() -> None:
    before, after = Reading(1000.0, 50_000, 10), Reading(3000.0, 54_000, 10)
    assert host_times(before, after, [50_000, 52_000, 54_000]) == [1000.0, 2000.0, 3000.0]


def test_fragments_of_a_plan() -> None:
    size = 4096
    ids = np.array([5, 0, 3], dtype=np.int64)
    plan = plan_of(side_of(6, size, ids), side_of(3, size, np.arange(3, dtype=np.int64)))
    assert plan.total == 3 * size
    ranges = [
        (src, dst, lengths)
        for chunk in plan.chunks((0,), 1 << 20)
        for _, src, _, dst, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi)
    ]
    src, dst, lengths = (np.concatenate(arrays) for arrays in zip(*ranges, strict=True))
    assert src.tolist() == (ids * size).tolist()
    assert dst.tolist() == [0, size, 2 * size]
    assert lengths.tolist() == [size] * 3


def test_the_cache_is_llamas() -> None:
    layout = layout_of(128)
    assert sum(group.token_bytes * len(group.layers) for group in layout.groups) == token_bytes()
    assert 8192 * token_bytes() == 1 << 30
    together = block_ids(2048, 160, 1, scattered=False)
    assert together == list(range(128))
    scattered = block_ids(2048, 160, 1, scattered=True)
    assert len(set(scattered)) == 128
    assert scattered == block_ids(2048, 160, 1, scattered=True)
    assert scattered != together


def test_steps_add_up() -> None:
    stages = Stages()
    stages.begin()
    stages.end("first")
    stages.add("first", 5)
    stages.add("second", 7)
    assert stages.spent["first"] >= 5
    assert stages.spent["second"] == 7


class Released:
    """An event that is done once a test says so."""

    def __init__(self, over: list[bool]) -> None:
        self._over = over

    def done(self) -> bool:
        return bool(self._over)


class Streams:
    """What stands for a GPU's clock and its streams: events that are done when ``over`` isn't empty."""

    def __init__(self) -> None:
        self.over: list[bool] = []

    def launch(self, duration_ns: int, stream: object) -> tuple[Released, int]:
        return Released(self.over), 0

    def record(self) -> Released:
        return Released(self.over)


@pytest.mark.asyncio
async def test_a_poll_is_timed_in_turns_that_each_look_and_then_the_poller_goes_on() -> None:
    streams = Streams()
    asyncio.get_running_loop().call_later(0.05, streams.over.append, True)
    taken = await _poll_us(streams, [streams], 20, 1)  # type: ignore[arg-type, list-item]
    assert taken > 0
    assert streams.over


class Panel:
    """Notes the lines that are drawn."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[int], list[float]]] = {}
        self.ticks: list[str] = []

    def plot(self, at: list[int], values: list[float], style: str, *, label: str) -> None:
        self.lines[label] = at, values

    def set_xticks(self, at: range, labels: list[str]) -> None:
        self.ticks = labels

    def __getattr__(self, name: str):
        return lambda *_, **__: None


def test_what_is_drawn() -> None:
    panel = Panel()
    rows = [{"costs": "others have no such columns"}]
    for size, rate in (("4k", 50.0), ("64k", 52.0)):
        rows.append({"fragments": size, "by": "aiokv", "d2h GB/s": Spread.of([rate])})
    draw = load("copy", "cuda").draw
    assert draw is not None
    draw(panel, rows)
    assert panel.lines == {"aiokv": ([0, 1], [50.0, 52.0])}
    assert panel.ticks == ["4k", "64k"]
    panel = Panel()
    rows = [
        {"tokens": 2048, "by": "nccl", "GB/s": Spread.of([5.0])},
        {"transport": "shm", "why": "it isn't there"},
    ]
    draw = load("transfer", "cuda").draw
    assert draw is not None
    draw(panel, rows)
    assert panel.lines == {"nccl": ([0], [5.0])}
    assert panel.ticks == ["2,048"]


def test_a_rate() -> None:
    assert Moved(300, 2.0).rate == 150.0


def test_turns_that_do_not_sleep_are_no_wakeups() -> None:
    selector = CountingSelector()

    async def turns() -> int:
        before = selector.wakeups
        for _ in range(10):
            await asyncio.sleep(0)
        return selector.wakeups - before

    async def sleeps() -> int:
        before = selector.wakeups
        for _ in range(3):
            await asyncio.sleep(0.001)
        return selector.wakeups - before

    with LoopThread(lambda: asyncio.SelectorEventLoop(selector)) as thread:
        assert thread.call(turns()) == 0
        assert thread.call(sleeps()) >= 3
