"""What a tier knows of a pool that it shares, where its messages and the owner's cross."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from aiokv.errors import LocalProtocolError
from aiokv.offload.offered import Offered
from aiokv.offload.policies import Key
from aiokv.offload.sharing.index import SharedIndex, Then
from aiokv.offload.sharing.keys import encoded
from aiokv.offload.sharing.messages import Clear, Done, Found, FromGuest, Kept, Release, Removed, Written


class Played:
    """An owner that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[FromGuest, Then]] = []
        self.told: list[FromGuest] = []
        self.there = True

    def ask(self, make: Callable[[int], FromGuest], then: Then) -> None:
        self.asked.append((make(len(self.asked)), then))

    def tell(self, message: FromGuest) -> None:
        self.told.append(message)

    def mapped(self, places: int) -> None:
        pass

    def unused(self) -> None:
        self.told.append(Clear(0))  # no message of its own


class Kit:
    def __init__(self) -> None:
        self.owner = Played()
        self.gone: list[tuple[list[Key], str]] = []
        self.index = SharedIndex(self.owner, removed=self._removed)

    def _removed(self, keys: Sequence[Key], why: str) -> None:
        self.gone.append((list(keys), why))

    async def find(self, keys: list[Key], places: list[int]) -> list[int]:
        finding = asyncio.ensure_future(self.index.find(keys))
        await asyncio.sleep(0)
        self.owner.asked[-1][1](Found(0, places, 5))
        return await finding

    def keep(self, keys: list[Key], new: list[int]) -> Offered:
        found: list[Offered] = []
        self.index.keep(keys, None, found.append)
        self.owner.asked[-1][1](Kept(0, len(keys), 0, list(enumerate(new)), [], 5))
        return found[0]


@pytest.mark.asyncio
async def test_what_was_given_twice_is_given_back_twice() -> None:
    kit = Kit()
    assert await kit.find(["a", "b"], [3, 4]) == [3, 4]
    assert await kit.find(["a"], [3]) == [3]
    kit.index.release([3, 4])
    assert kit.owner.told == [Release([4])]
    kit.index.pin([3])
    kit.index.release([3])
    kit.index.release([3])
    assert kit.owner.told[1:] == [Release([3, 3])]
    with pytest.raises(LocalProtocolError, match="more often"):
        kit.index.release([3])
    assert kit.index.in_use == 0


@pytest.mark.asyncio
async def test_what_failed_here_is_not_found_by_a_lookup_that_was_answered_before() -> None:
    """The owner said so when it didn't know yet."""
    kit = Kit()
    assert kit.keep(["a", "b"], [3, 4]).new == [(0, 3), (1, 4)]
    finding = asyncio.ensure_future(kit.index.find(["a", "b"]))
    await asyncio.sleep(0)
    _, answer = kit.owner.asked[-1]
    kit.index.finish([4], ok=False)
    written, taken = kit.owner.asked[-1]
    assert written == Written(2, [4], False)
    assert kit.gone == [(["b"], "dropped")]
    answer(Found(1, [3, 4], 5))
    assert await finding == [3]
    assert kit.owner.told == [Release([4]), Release([4])], "that of the store, and what is of no use"
    # And a store that would have joined it ends before it.
    found: list[Offered] = []
    kit.index.keep(["a", "b", "c"], None, found.append)
    kit.owner.asked[-1][1](Kept(3, 3, 0, [(2, 5)], [(0, 3), (1, 4)], 5))
    assert (found[0].kept, found[0].pending, found[0].new) == (1, [(0, 3)], [])
    assert kit.owner.asked[-1][0] == Written(4, [5], False)
    taken(Done(2, 1, 5))
    kit.owner.asked[-1][1](Done(4, 1, 5))
    # The owner knows: it is another block by now.
    assert await kit.find(["d"], [4]) == [4]
    assert kit.index.ready(4)
    assert not kit.index.ready(3), "it is being written"


@pytest.mark.asyncio
async def test_what_was_found_changed_is_not_found_by_a_lookup_that_was_answered_before() -> None:
    kit = Kit()
    await kit.find(["a"], [3])
    finding = asyncio.ensure_future(kit.index.find(["a"]))
    await asyncio.sleep(0)
    _, answer = kit.owner.asked[-1]
    assert kit.index.drop([3]) == ["a"]
    assert (kit.index.detached, kit.index.key_at(3)) == (1, None)
    answer(Found(1, [3], 5))
    assert await finding == []
    kit.index.release([3])
    assert kit.owner.told == [Release([3, 3])]
    assert (kit.index.detached, kit.index.in_use) == (0, 0)


@pytest.mark.asyncio
async def test_what_is_told_to_go_is_of_no_use_here() -> None:
    kit = Kit()
    await kit.find([("a", 1), "b"], [3, 4])
    kit.index.removed(Removed(encoded([("a", 1), "z"]), [3], "deleted"))
    assert kit.gone == [([("a", 1), "z"], "deleted")]
    assert kit.index.keys_at([3, 4]) == [None, "b"]
    kit.index.lost(10)
    assert kit.gone[1:] == [([], "lost")]
    assert kit.index.keys_at([3, 4]) == [None, None]
    assert kit.index.detached == 2
    assert kit.index.orphaned([3])
    # Another owner, whose places have other numbers here.
    kit.index.renew(16)
    assert await kit.find(["b"], [3]) == [19]
    kit.index.release([3, 19])
    assert kit.owner.told == [Release([3])], "nothing of before"
    assert kit.keep(["c"], [0]).new == [(0, 16)]
    asked = len(kit.owner.asked)
    kit.index.finish([16], ok=True)
    assert kit.owner.asked[asked][0] == Written(asked, [0], True)
    kit.index.release([4])
    assert kit.owner.told[2:] == [Clear(0)]
    assert (kit.index.detached, kit.index.in_use) == (0, 0)


@pytest.mark.asyncio
async def test_cancelled_before_or_as_the_answer_comes_nothing_is_held() -> None:
    for late in (False, True):
        kit = Kit()
        finding = asyncio.ensure_future(kit.index.find(["a"]))
        await asyncio.sleep(0)
        _, answer = kit.owner.asked[-1]
        if late:
            answer(Found(0, [3], 5))
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        if not late:
            answer(Found(0, [3], 5))
        assert kit.index.in_use == 0
        assert kit.owner.told == [Release([3])]
