"""The soak: a few seconds of it, and that what may not happen would be found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.proto.layout import CacheLayout
from aiokv.testing.pairs import kv_of
from aiokv.testing.soak.judge import Judge
from aiokv.testing.soak.nursery import Nursery
from aiokv.testing.soak.orders import Ended, Health, Move, Promised, decode_report, encode
from aiokv.testing.soak.run import Soak, run
from aiokv.testing.soak.store import BlocksChanged, Store

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16")
SPLIT = CacheLayout.attention(
    layers=2, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16", axes="bthd", split=True
)


def test_some_seconds_of_it(seed: int) -> None:
    said: list[str] = []
    assert run(3.0, seed, 2, said.append) == []
    assert "landed and compared" in said[-1]


# -- nobody is left behind --------------------------------------------------------------------------


def workers_of(parent: int) -> list[int]:
    """Processes that a soak began: they say whose they are in their command lines."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"aiokv.testing.soak.nursery" in words and str(parent).encode() in words:
            found.append(int(place.name))
    return found


def busy(parent: int) -> list[int]:
    """Those of them that have begun to work: their engines have threads of ZeroMQ's."""
    return [pid for pid in workers_of(parent) if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1]


def until_gone(parent: int) -> None:
    while workers_of(parent):
        time.sleep(0.02)


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """A soak whose workers live."""
    command = [sys.executable, "-m", "aiokv.testing.soak", "--minutes", "5", "--workers", "2", "--seed", "1"]
    # Whoever runs the tests in the background of a shell has it ignored, which a child would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        # Who was forked a moment ago hasn't yet asked to end with its parent.
        while len(busy(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        yield process
        process.kill()
        until_gone(process.pid)


def test_after_ctrl_c_no_process_is_left(program: subprocess.Popen[str]) -> None:
    os.killpg(program.pid, signal.SIGINT)
    out, _ = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "interrupted" in out
    assert workers_of(program.pid) == []


def test_workers_end_with_a_parent_that_is_killed_also_when_they_are_stopped(
    program: subprocess.Popen[str],
) -> None:
    for pid in workers_of(program.pid):
        os.kill(pid, signal.SIGSTOP)
    program.kill()
    program.wait(timeout=30)
    until_gone(program.pid)


# -- what is wrong is found -------------------------------------------------------------------------


def order(role: str) -> Move:
    return Move("t", role, "", 1, 5.0, 0.0, [], False)  # type: ignore[arg-type]


def judged(promised: str, producer: str, consumer: str, digest: str = "") -> Judge:
    """A transfer of which the two sides say these things."""
    judge = Judge()
    judge.begin(order("producer"), 0.0)
    judge.begin(order("consumer"), 0.0)
    judge.promise(Promised("t", promised))
    judge.end(Ended("t", "consumer", consumer, digest=digest, nbytes=7, transport="shm"))
    judge.end(Ended("t", "producer", producer))
    return judge


def test_what_landed_is_compared() -> None:
    judge = judged("right", "", "", "right")
    assert (judge.wrong, judge.verified, judge.verified_bytes) == ([], 1, 7)
    assert judge.transfers == {}


@pytest.mark.parametrize("producer", ["", "PeerLostError", "killed"])
def test_wrong_bytes_are_found_however_the_producer_ended(producer: str) -> None:
    assert "wrong bytes by shm" in judged("right", producer, "", "wrong").wrong[0]


def test_a_producer_that_landed_alone_is_found() -> None:
    assert "landed at its producer" in judged("right", "", "DeadlineExceeded").wrong[0]
    assert judged("right", "", "killed").wrong == []
    assert judged("right", "PeerLostError", "TransferAborted").wrong == []


def test_an_end_that_nobody_expects_is_found() -> None:
    assert "DeviceError" in judged("right", "TransferAborted", "DeviceError").wrong[0]


def test_a_side_that_ends_twice_is_found() -> None:
    judge = judged("right", "", "", "right")
    judge.end(Ended("t", "consumer"))
    assert "ended twice" in judge.wrong[0]


def test_what_hangs_is_found_but_not_who_is_stopped() -> None:
    slot = Soak(Nursery(), 1, 2, lambda text: None).slots[0]
    side = slot._judge.begin(order("producer"), 0.0)
    slot._going["t", "producer"] = (side, 5.0)
    assert slot.late(5.0) == []
    assert slot.late(1000.0) == ["worker 0: producer of t hangs"]
    slot.forgive(1000.0)  # nobody looked for so long
    assert slot.late(1000.0) == []
    assert slot.late(2000.0) == ["worker 0: producer of t hangs"]
    slot._stopped_at = 1.0
    assert slot.late(2000.0) == []


def test_a_worker_that_grows_is_found() -> None:
    soak = Soak(Nursery(), 1, 2, lambda text: None)
    slot = soak.slots[0]
    slot.finished = Health(0, 0, 0, 0, 0, 0, {})
    slot.health = [(float(when), Health(100 << 20, 30, 1, 1, 1, 1, {})) for when in range(200)]
    assert soak._left(slot) == []
    slot.health = [(float(when), Health(100 + when << 20, 30, 1, 1, 1, 1, {})) for when in range(200)]
    assert soak._left(slot) == ["it grew from 174 to 274 MiB"]
    slot.finished.descriptors = 2
    assert "in the end 2 descriptors" in soak._left(slot)[0]


# -- blocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUT, SPLIT], ids=["stacked", "split"])
def test_a_store_reads_what_is_in_the_cache(layout: CacheLayout) -> None:
    with KVCache.allocate(layout) as cache:
        store = Store(cache, 1)
        blocks = store.take(3)
        data = [store.made_up(3) for _ in range(2)]
        for layer, each in enumerate(data):
            store.write(layer, blocks, each)
            assert np.array_equal(store.read(layer, blocks), each)
        found = kv_of(cache, blocks)
        assert np.array_equal(found, np.stack(data).reshape(found.shape))
        store.give(blocks)
        assert not np.array_equal(store.read(0, blocks), data[0])
        assert store.take(9) == []
        del store


def test_blocks_that_are_written_to_by_nobody_are_found() -> None:
    with KVCache.allocate(LAYOUT) as cache:
        store = Store(cache, 1)
        blocks = store.take(8)
        store.give(blocks)
        data = store.read(1, [5])
        data[0, 0, 0, 0, 0] ^= 1
        store.write(1, [5], data)
        with pytest.raises(BlocksChanged, match=r"blocks \[5\] were written"):
            store.take(8)
        del store


def test_what_is_said_comes_over() -> None:
    ended = Ended("t", "consumer", "PeerLostError", "gone", took_s=1.5)
    assert decode_report(encode(ended)) == ended
