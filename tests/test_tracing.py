"""What the recorder writes of a transfer: both sides, in the order in which it happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiokv
from aiokv.control.memory import MemoryNetwork
from aiokv.testing.pairs import LAYOUT
from aiokv.tracing import Recorder, main, merge
from aiokv.transports.memory import MemoryHub, MemoryTransport

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def traced(*recorders: Recorder | None) -> AsyncIterator[Sequence[aiokv.TransferEngine]]:
    """An engine for each recorder, joined by memory."""
    hub, network = MemoryHub(), MemoryNetwork()
    async with AsyncExitStack() as stack:
        engines = []
        for number, recorder in enumerate(recorders):
            cache = stack.enter_context(aiokv.KVCache.allocate(LAYOUT))
            engine = aiokv.TransferEngine(
                cache,
                transports=[MemoryTransport(hub)],
                channel=network.channel(f"memory://{number}"),
                trace=recorder,
            )
            engines.append(await stack.enter_async_context(engine))
        yield engines


async def move(
    producer: aiokv.TransferEngine,
    consumer: aiokv.TransferEngine,
    tid: str,
    blocks: Sequence[int] = (1, 2),
    trace: str = "",
) -> None:
    async with consumer.fetch(tid, blocks, sources=[producer.address], trace=trace) as fetched:
        async with producer.offer(tid, blocks):
            pass
        await fetched.wait()


def written(recorder: Recorder, path: Path) -> list[dict[str, Any]]:
    recorder.write(path)
    return events_of(path)


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def of_engine(events: list[dict[str, Any]], address: str) -> list[dict[str, Any]]:
    """What the engine at an address did, by time."""
    (process,) = (
        event["pid"]
        for event in events
        if event["name"] == "process_name" and address in event["args"]["name"]
    )
    return sorted(
        (event for event in events if event["pid"] == process and event["ph"] != "M"),
        key=lambda event: event["ts"],
    )


@pytest.mark.asyncio
@pytest.mark.may_block(reason="writes a file")
async def test_both_sides_of_a_transfer_are_in_one_file(tmp_path: Path) -> None:
    recorder = Recorder("pair")
    async with traced(recorder, recorder) as (producer, consumer):
        await move(producer, consumer, "t", trace=PARENT)
        events = written(recorder, tmp_path / "trace.json")

        sides = {each.address: of_engine(events, each.address) for each in (producer, consumer)}
        for address, role in ((producer.address, "producer"), (consumer.address, "consumer")):
            bars = [event["name"] for event in sides[address] if event["ph"] == "X"]
            assert sorted(bars) == sorted([f"t ({role})", "queued", "granted", "moving", "draining"])
            marks = [event["name"] for event in sides[address] if event["ph"] == "i"]
            assert marks[-2:] == ["landed", "woke"], address
        moved = [event["args"]["layer"] for event in sides[consumer.address] if event["name"] == "moved"]
        assert sorted(moved) == list(range(LAYOUT.layers))

        (whole,) = (event for event in sides[consumer.address] if event["name"] == "t (consumer)")
        assert whole["args"]["traceparent"] == PARENT
        assert whole["args"]["transport"] == "memory"
        assert whole["args"]["peer"] == producer.address
        assert whole["args"]["state"] == "landed"
        assert whole["args"]["bytes"] == consumer.statistics().bytes_received
        (whole,) = (event for event in sides[producer.address] if event["name"] == "t (producer)")
        assert whole["args"]["traceparent of the peer"] == PARENT


@pytest.mark.asyncio
@pytest.mark.may_block(reason="writes a file")
async def test_bars_of_one_lane_lie_within_each_other_or_apart(tmp_path: Path) -> None:
    recorder = Recorder()
    async with traced(recorder, recorder) as (producer, consumer):
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                blocks = [2 * number, 2 * number + 1]
                group.create_task(move(producer, consumer, f"t{number}", blocks))
        events = written(recorder, tmp_path / "trace.json")
        for engine in (producer, consumer):
            bars = [event for event in of_engine(events, engine.address) if event["ph"] == "X"]
            assert len({bar["tid"] for bar in bars}) == 4  # they went on at once
            for lane in {bar["tid"] for bar in bars}:
                spans = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == lane]
                for a, b in spans:
                    for c, d in spans:
                        apart = b <= c + 0.01 or d <= a + 0.01  # rounding
                        within = (a <= c + 0.01 and d <= b + 0.01) or (c <= a + 0.01 and b <= d + 0.01)
                        assert apart or within


@pytest.mark.asyncio
@pytest.mark.may_block(reason="writes files")
async def test_files_of_two_processes_are_merged(tmp_path: Path) -> None:
    prefill, decode = Recorder("prefill"), Recorder("decode")
    async with traced(prefill, decode) as (producer, consumer):
        await move(producer, consumer, "t")
        prefill.write(tmp_path / "a.json")
        decode.write(tmp_path / "b.json")
        merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "both.json")
        events = events_of(tmp_path / "both.json")
        labels = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert labels[0].startswith(f"prefill {producer.address}")
        assert labels[1].startswith(f"decode {consumer.address}")
        arrows = {event["ph"]: event for event in events if event["name"] == "grant"}
        assert arrows["s"]["id"] == arrows["f"]["id"]
        assert arrows["s"]["pid"] != arrows["f"]["pid"]
        assert arrows["s"]["ts"] <= arrows["f"]["ts"]  # one clock
        assert json.loads((tmp_path / "both.json").read_text())["otherData"]["aiokv"]["alignment"] == ""


def test_files_of_two_hosts_are_merged_by_their_wall_clocks(tmp_path: Path) -> None:
    paths = []
    for name, boot, ts, wall in (("a", "1", 100.0, 5_000_000), ("b", "2", 700.0, 4_500_000)):
        event = {"ph": "i", "name": name, "pid": 1, "tid": 0, "ts": ts, "s": "t"}
        clock = {"boot": boot, "host": f"host {name}", "wall": wall}
        about = {"traceEvents": [event], "otherData": {"aiokv": {"clocks": [clock]}}}
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(about))
    merge(paths, tmp_path / "both.json")
    first, second = events_of(tmp_path / "both.json")
    assert (first["ts"], second["ts"]) == (100.0, 200.0)
    assert (first["pid"], second["pid"]) == (1, 2)
    alignment = json.loads((tmp_path / "both.json").read_text())["otherData"]["aiokv"]["alignment"]
    assert "wall clocks of host a, host b" in alignment


def test_what_is_no_trace_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"other\.json is no trace"):
        merge([path], tmp_path / "both.json")


def test_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recorder("a").write(tmp_path / "a.json")
    Recorder("b").write(tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main([*files, "--into", str(tmp_path / "both.json")]) == 0
    assert events_of(tmp_path / "both.json") == []
    assert main([str(tmp_path / "none.json"), "--into", str(tmp_path / "both.json")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("failed: [Errno 2] No such file or directory: ")
    assert "none.json" in said
    assert main([*files, files[0], "--into", str(tmp_path / "both.json")]) == 1
    assert f"{files[0]} is given twice" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.may_block(reason="writes files")
async def test_what_goes_on_is_written_as_far_as_it_is_and_failures_with_their_error(tmp_path: Path) -> None:
    recorder = Recorder()
    async with traced(recorder) as (engine,):
        offer = engine.offer("t", [1])
        offer.start()
        names = [event["name"] for event in written(recorder, tmp_path / "a.json") if event["ph"] == "X"]
        assert names == ["queued", "t (producer)"]
        offer.cancel("not needed")
        with pytest.raises(aiokv.TransferAborted):
            await offer.wait()
        events = written(recorder, tmp_path / "b.json")
        (whole,) = (event for event in events if event["name"] == "t (producer)")
        assert whole["args"]["state"] == "aborted"
        assert "not needed" in whole["args"]["error"]
        assert [event["name"] for event in events if event["ph"] == "i"] == ["aborted", "woke"]


@pytest.mark.asyncio
@pytest.mark.may_block(reason="writes a file")
async def test_beyond_its_limit_events_are_counted_and_dropped(tmp_path: Path) -> None:
    recorder = Recorder(limit=3)
    async with traced(recorder, recorder) as (producer, consumer):
        await move(producer, consumer, "t")
    events = [event for event in written(recorder, tmp_path / "a.json") if event["ph"] != "M"]
    assert len(events) == 3
    assert recorder.dropped > 0
    about = json.loads((tmp_path / "a.json").read_text())["otherData"]["aiokv"]
    assert about["dropped"] == recorder.dropped
    with pytest.raises(ValueError, match="limit"):
        Recorder(limit=0)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="allocates a cache")
async def test_only_a_recorder_is_taken_for_one() -> None:
    with aiokv.KVCache.allocate(LAYOUT) as cache, pytest.raises(TypeError, match="trace is a recorder"):
        aiokv.TransferEngine(cache, trace="00-0af7")  # type: ignore[arg-type]
