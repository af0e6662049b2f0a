"""What pair.py shows of requests that went well, and of those that didn't; and how it is stopped."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import aiokv

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

import pair
from rich.console import Console

from serving.channel import Message, Reply, RequestFailed, serve
from serving.model import Model
from serving.report import COLUMNS, table, verdicts

NAMES = ["usual", "whole blocks", "long"]


def reply_of(answer: list[int], landed: tuple[int, int] = (1_200_000_000, 5_250_000_000)) -> Message:
    ready = [1_000_000_000, 2_000_000_000]
    return {
        "answer": answer,
        "asked": 0,
        "bytes": 70 << 20,
        "landed": list(landed),
        "prefill": {"began": 0, "ready": ready, "ended": 5_000_000_000},
        "tokens_at": [6_000_000_000],
        "transport": "shm",
    }


def told(replies: dict[str, Message], expected: dict[str, list[int]]) -> tuple[bool, list[str]]:
    lines = list(verdicts(NAMES, replies, expected, "long"))
    return all(good for good, _ in lines), [line for _, line in lines]


def test_a_table_fits_a_terminal_and_says_what_its_columns_are() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(table({name: [0] * 799 for name in NAMES}, dict.fromkeys(NAMES, reply_of([1]))))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\u2026" not in shown
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("long")]
    assert row == ["long", "799", "70.00", "shm", "5000", "3450.0", "0.02", "1/2", "250.0", "6000"]
    for title, _, meaning in COLUMNS:
        assert not meaning or f"{title.replace('-', '').replace(chr(10), '')}: {meaning}".replace(
            " ", ""
        ) in (shown.replace(" ", ""))


def test_equal() -> None:
    replies = {name: reply_of([1, 2]) for name in NAMES}
    assert told(replies, {name: [1, 2] for name in NAMES}) == (
        True,
        [
            "equal: all 3 answers (6 tokens) are those of one process alone",
            "overlapped: 1 of 2 layers of 'long' landed before its prefill had ended",
        ],
    )


def test_different() -> None:
    replies = {"usual": reply_of([1]), "whole blocks": reply_of([2]), "long": reply_of([3, 4])}
    good, lines = told(replies, {"usual": [1], "whole blocks": [1], "long": [3, 3]})
    assert not good
    assert lines[:3] == [
        "DIFFERENT: 2 of 3 answers are not those of one process alone: whole blocks, long",
        "  whole blocks: the pair answered [2], one process [1]",
        "  long: the pair answered [3, 4], one process [3, 3]",
    ]


def test_failed() -> None:
    assert told({"usual": reply_of([1])}, {"usual": [1]}) == (
        False,
        [
            "FAILED: 2 of 3 requests: whole blocks, long",
            "equal: all 1 answers that came (1 tokens) are those of one process alone",
        ],
    )
    assert told({}, {}) == (False, ["FAILED: 3 of 3 requests: usual, whole blocks, long"])


def test_not_overlapped() -> None:
    replies = dict.fromkeys(NAMES, reply_of([1], landed=(5_000_000_000, 5_250_000_000)))
    good, lines = told(replies, {name: [1] for name in NAMES})
    assert not good
    assert lines[1] == "NOT OVERLAPPED: 0 of 2 layers of 'long' landed before its prefill had ended"


@pytest.mark.asyncio
async def test_a_request_that_fails_is_shown_by_its_name() -> None:
    async def answer(message: Message, reply: Reply) -> None:
        await reply({"text": "Once upon "})
        raise ValueError("the model [diverged]")

    console = Console(width=20, file=io.StringIO())
    async with serve("127.0.0.1:0", answer) as address:
        assert await pair.ask(console, address, "whole blocks", {}) is None
    assert await pair.ask(console, address, "long", {}) is None
    assert isinstance(console.file, io.StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first == f"whole blocks | failed: {address}: ValueError: the model [diverged]"
    assert second.startswith(f"        long | failed: {address}: ")


@pytest.mark.asyncio
async def test_a_process_that_does_not_come_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RequestFailed, match=r"prefill\.py ended before it was ready"):
        async with pair.children() as processes:
            await pair.reachable(processes[0], "prefill.py")
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_comparison_ends_at_the_next_layer(model: Model, after: int) -> None:
    options = argparse.Namespace(blocks=8, block_size=16, limit=50)
    stop, layers = threading.Event(), 0

    class Counted(threading.Event):
        def is_set(self) -> bool:
            nonlocal layers
            if layers == after:
                stop.set()
            layers += 1
            return stop.is_set()

    with pytest.raises(pair.Stopped):
        pair.alone(model, {"usual": [1, 2, 3]}, options, Counted())
    assert layers == after + 1


def children_of(process: subprocess.Popen[str]) -> list[int]:
    try:
        return [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


@pytest.mark.timeout(150)
@pytest.mark.parametrize("when", ["starting", pytest.param("comparing", marks=pytest.mark.slow)])
def test_interrupted(when: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(Path(pair.__file__)), "--model=tiny-random", "--limit=16"],
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            assert running.stdout and running.stderr
            started: list[int] = []
            while running.poll() is None and len(started) < 2:
                started = children_of(running)
            if when == "comparing":
                next(
                    (line for line in running.stdout if line.startswith("Now the same in one process")), None
                )
            # As a terminal does: to all of the foreground's process group.
            os.killpg(running.pid, signal.SIGINT)
            output, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, errors
    assert errors.splitlines()[-1:] == ["stopped"]
    assert "Traceback" not in errors
    assert "equal" not in output
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
