from __future__ import annotations

from aiokv.device.host import HostBuffer
from aiokv.transports.nccl_staging import Pool


def make(count: int) -> tuple[Pool, list[str]]:
    wanted: list[str] = []
    buffer = HostBuffer(memoryview(bytearray(1000)))
    return Pool(buffer, 100, count, 10, lambda: wanted.append("wanted")), wanted


def test_the_more_are_taken_the_fewer_one_gets() -> None:
    pool, wanted = make(40)
    got: list[list] = []
    while not pool.short:
        pool.take(len(got), got.append)
    assert [len(slots) for slots in got] == [8, 8, 8, 8, 4, 2, 1, 1]
    slots = [slot for each in got for slot in each]
    assert sorted(slot.offset for slot in slots) == list(range(100, 500, 10))
    assert all(slot.address == slot.buffer.address + slot.offset for slot in slots)
    assert wanted == ["wanted"]


def test_who_waits_gets_the_first_that_come_back_in_turn() -> None:
    pool, _ = make(1)
    got: dict[str, list] = {}
    for name in "abcd":
        pool.take(name, lambda slots, name=name: got.setdefault(name, slots))
    assert list(got) == ["a"]
    pool.leave("b")
    pool.leave("a")
    assert pool.short
    pool.give(got["a"])
    assert list(got) == ["a", "c"]
    pool.give(got["c"])
    pool.give(got["d"])
    assert list(got) == ["a", "c", "d"]
    assert not pool.short
    pool.take("e", lambda slots: got.setdefault("e", slots))
    assert got["e"] == got["a"]
