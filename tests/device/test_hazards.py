"""Which ranges overlap and which accesses nothing orders, against plain models of both."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiokv.device.hazards import Access
from aiokv.device.mocked import MockedDevice, MockedEvent

_RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=8)


def access(ranges: list[tuple[int, int]]) -> Access:
    offsets, lengths = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True))
    return Access("", offsets, lengths, writes=True, point=None)


@given(mine=_RANGES, theirs=_RANGES)
def test_overlap_is_found_and_true(mine: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    def touched(ranges: list[tuple[int, int]]) -> set[int]:
        return {byte for start, length in ranges for byte in range(start, start + length)}

    found = access(mine).overlap(access(theirs))
    both = touched(mine) & touched(theirs)
    assert (found is not None) == bool(both)
    if found is not None:
        assert set(range(*found)) <= both
        assert found[0] < found[1]


_COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "record", "wait", "see"]), st.integers(0, 2), st.integers(0, 5)
    ),
    max_size=40,
)


@given(commands=_COMMANDS, seed=st.integers(0, 1000))
def test_hazards_are_the_unordered_pairs(commands: list[tuple[str, int, int]], seed: int) -> None:
    """Against a model that keeps, for each operation, the plain set of all that comes before it."""
    device = MockedDevice(seed)
    buffer = device.allocate(8)
    streams = [device.stream() for _ in range(3)]
    before: list[set[int]] = [set() for _ in streams]  # what precedes the next operation of a stream
    known: set[int] = set()  # what the host has seen done
    accesses: list[tuple[int, bool]] = []
    events: list[tuple[MockedEvent, set[int]]] = []
    expected = []
    for number, (command, which, pick) in enumerate(commands):
        stream, past = streams[which], before[which]
        if command in {"write", "read"}:
            writes = command == "write"
            if writes:
                stream.write(buffer, 0, b"x")
            else:
                stream.read(buffer, 0, 1)
            expected += [
                (earlier, number)
                for earlier, wrote in accesses
                if (wrote or writes) and earlier not in past and earlier not in known
            ]
            accesses.append((number, writes))
            past.add(number)
        elif command == "record":
            events.append((stream.record(), set(past)))
        elif events:
            event, covered = events[pick % len(events)]
            if command == "wait":
                stream.wait(event)
                past |= covered
            else:
                device.run()
                assert event.done()
                known |= covered
    assert len(device.hazards) == len(expected)
    device.run()
    assert device.idle
