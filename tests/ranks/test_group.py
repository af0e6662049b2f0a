"""``RankGroup`` on ranks of one process: the suite of all groups, and what only one process can do."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.device.poller import CompletionPoller
from aiokv.device.timer import MicroTimer
from aiokv.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    DeadlineExceeded,
    LocalProtocolError,
    PeerLostError,
)
from aiokv.ranks import Blocks, Failed, Hit, Miss, Outcome, RankGroup, Severity, Tokens
from aiokv.ranks.vector import REQUESTS
from aiokv.testing.conformance.ranks import CASES, drawn, expected
from aiokv.testing.ranks import MemoryRanks
from aiokv.testing.virtual import VirtualLoop


@contextmanager
def groups_of(ranks: MemoryRanks, **options: Any) -> Iterator[list[RankGroup]]:
    groups = [RankGroup(ranks.collective(rank), **options) for rank in range(ranks.size)]
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


@asynccontextmanager
async def several(size: int, **options: Any) -> AsyncIterator[tuple[MemoryRanks, list[RankGroup]]]:
    ranks = MemoryRanks(size)
    with groups_of(ranks, **options) as groups:
        yield ranks, groups


def virtually(
    seed: int, size: int, play: Callable[[MemoryRanks, list[RankGroup]], Awaitable[None]], **options: Any
) -> None:
    """Run something with ranks whose reductions take their time, in virtual time."""
    loop = VirtualLoop()
    clock = loop.virtual.clock
    ranks = MemoryRanks(size, seed=seed, longest_ns=5_000_000, clock=clock)
    poller = partial(CompletionPoller, clock=clock, timer=partial(MicroTimer, precise=False))
    try:
        with groups_of(ranks, poller=poller, **options) as groups:
            loop.run_until_complete(play(ranks, groups))
            # Nothing pending, nothing scheduled: also while the groups are open.
            assert loop.idle, loop.scheduled()
    finally:
        loop.close()


# -- the suite


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance(case: Any, size: int) -> None:
    async with several(size) as (ranks, groups):
        await asyncio.gather(*map(case, groups))
        assert len({ranks.entered(rank) for rank in range(size)}) == 1


# -- random disagreement, late ranks, failures and cancellations


@given(seed=st.integers(0, 2**32), size=st.integers(1, 5), batches=st.integers(1, 6))
def test_whatever_they_bring_all_get_the_same(seed: int, size: int, batches: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 3, 64, REQUESTS + 1]) for _ in range(batches)]

    async def one(group: RankGroup) -> None:
        pace = random.Random(seed + group.rank)
        for number, count in enumerate(sizes):
            await asyncio.sleep(pace.choice([0, 0, 0.004, 0.3]))
            brought = [drawn(seed + number, rank, count) for rank in range(size)]
            assert await group.agree(brought[group.rank], keys=[b"%d" % number] * count) == expected(brought)

    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        await asyncio.gather(*map(one, groups))
        assert ranks.reductions == sum(-(-count // REQUESTS) for count in sizes)

    virtually(seed, size, play)


def check_fated(column: list[str], number: int, agreed: list[Any]) -> None:
    if "raises" in column:
        assert agreed[0] == Failed(Severity.TIMEOUT)
    elif "cancelled" in column:  # before it had looked, or afterwards
        assert agreed[0] in (Failed(Severity.CANCELLED), Hit(Blocks(1)))
    else:
        assert agreed == [Hit(Blocks(1)), Failed(Severity.INVALID) if number % 2 else Miss()]


@given(seed=st.integers(0, 2**32), size=st.integers(2, 4))
def test_who_is_cancelled_or_fails_holds_up_nobody(seed: int, size: int) -> None:
    draw = random.Random(seed)
    batches = 5
    #: What befalls each rank in each batch.
    fates = [[draw.choice(["", "", "raises", "cancelled"]) for _ in range(batches)] for _ in range(size)]

    async def look(group: RankGroup, number: int, fate: str, pace: random.Random) -> list[Any]:
        async with group.batch(2, keys=[b"a%d" % number, b"b"]) as batch:
            await asyncio.sleep(pace.choice([0, 0.002, 0.1]))
            if fate == "raises":
                raise TimeoutError
            batch[0] = Hit(Blocks(1 + group.rank))
            batch[1] = Failed(Severity.INVALID) if number % 2 else Miss()
        return batch.agreed

    async def one(group: RankGroup) -> None:
        pace = random.Random(seed + group.rank)
        for number in range(batches):
            fate = fates[group.rank][number]
            task = asyncio.create_task(look(group, number, fate, pace))
            if fate == "cancelled":
                await asyncio.sleep(pace.choice([0, 0.001, 0.05, 0.2]))
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                assert fate == "cancelled"
            elif error := task.exception():
                assert fate == "raises" and isinstance(error, TimeoutError)
            else:
                check_fated([fates[rank][number] for rank in range(size)], number, task.result())

    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        await asyncio.gather(*map(one, groups))
        # A rank that was cancelled may be through before its last reductions are.
        while any(group.statistics().agreed < batches for group in groups):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        assert {ranks.entered(rank) for rank in range(size)} == {batches}

    virtually(seed, size, play)


@given(seed=st.integers(0, 2**32), size=st.integers(2, 5), when=st.integers(0, 20_000_000))
def test_the_loss_of_a_rank_raises_on_all_others(seed: int, size: int, when: int) -> None:
    victim = seed % size

    async def one(group: RankGroup) -> None:
        if group.rank == victim:
            for _ in range(20):
                try:
                    await group.agree([Miss()])
                except PeerLostError:  # of itself
                    return
            return
        with pytest.raises(PeerLostError):
            for _ in range(1000):
                await group.agree([Miss()])
        with pytest.raises(PeerLostError, match="was given up"):
            await group.agree([])

    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        async def kill() -> None:
            await asyncio.sleep(when * 1e-9)
            ranks.lose(victim)

        await asyncio.gather(kill(), *map(one, groups))

    virtually(seed, size, play)


@given(seed=st.integers(0, 2**32), size=st.integers(2, 5))
def test_a_rank_that_never_comes_costs_the_deadline(seed: int, size: int) -> None:
    async def one(group: RankGroup) -> None:
        assert await group.agree([Miss()]) == [Miss()]
        if group.rank == seed % size:
            return
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="not all ranks came to a batch of 3 requests within 2 s"):
            await group.agree([Miss()] * 3, deadline=2)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2)
        with pytest.raises(PeerLostError, match="was given up: .* not all ranks came"):
            await group.agree([Miss()])

    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        await asyncio.gather(*map(one, groups))

    virtually(seed, size, play, deadline=1000)


# -- the deadline


@pytest.mark.asyncio
async def test_a_late_rank_is_told_with_the_next_batch_and_writes_to_nobody_else() -> None:
    async with several(2) as (_, groups):
        with pytest.raises(DeadlineExceeded):
            await groups[0].agree([Hit(Blocks(3))], deadline=0.01)
        # What was given up goes on all the same, and is done with now.
        assert await groups[1].agree([Hit(Blocks(5))]) == [Hit(Blocks(3))]
        with groups_of(MemoryRanks(2)) as fresh:
            assert (await asyncio.gather(*(group.agree([Miss()]) for group in fresh))) == [[Miss()]] * 2
        with pytest.raises(DeadlineExceeded):
            await groups[1].agree([Hit(Blocks(5))], deadline=0.01)


def test_the_verdict_comes_after_one_more_look() -> None:
    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        first = asyncio.ensure_future(groups[0].agree([Hit(Blocks(2))] * (REQUESTS + 1), deadline=1))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(groups[1].agree([Hit(Blocks(1))] * (REQUESTS + 1), deadline=100))
        await asyncio.sleep(0)
        # This loop stands still for longer than the deadline, though all is there.
        asyncio.get_running_loop().virtual.advance(3_000_000_000)  # type: ignore[attr-defined]
        assert await second == [Hit(Blocks(1))] * (REQUESTS + 1)
        assert await first == [Hit(Blocks(1))] * (REQUESTS + 1)

    async def with_patience(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        ranks._longest_ns = 0
        await play(ranks, groups)

    virtually(1, 2, with_patience)


@pytest.mark.asyncio
@pytest.mark.parametrize("deadline", [0, -1, float("nan"), 1e9])
async def test_deadlines_that_are_none_are_refused_before_anything_is_entered(deadline: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        RankGroup(MemoryRanks(1).collective(0), deadline=deadline)
    async with several(1) as (ranks, (group,)):
        with pytest.raises(ValueError, match="deadline"):
            await group.agree([Miss()], deadline=deadline)
        assert not ranks.reductions


# -- the end


@pytest.mark.asyncio
async def test_closing_tells_who_waits_and_may_be_done_twice() -> None:
    async with several(2) as (_, groups):
        waiting = asyncio.ensure_future(groups[0].agree([Miss()]))
        await asyncio.sleep(0)
        groups[0].close()
        with pytest.raises(ClosedError):
            await waiting
        groups[0].close()
        with pytest.raises(ClosedError):
            await groups[0].agree([])
        with pytest.raises(ClosedError):
            async with groups[0].batch(1):
                pytest.fail("nothing can be entered")
        assert "closed" in repr(groups[0])
        assert repr(groups[1]) == "<RankGroup rank 1 of 2>"


@pytest.mark.asyncio
async def test_a_loss_is_logged_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with several(3) as (ranks, groups):
        waiting = asyncio.ensure_future(groups[0].agree([Miss()]))
        await asyncio.sleep(0)
        ranks.lose(2)
        with pytest.raises(
            PeerLostError, match="rank 0 of 3: a rank was lost, or the way to it: rank 2 is gone"
        ):
            await waiting
        with pytest.raises(PeerLostError, match="rank 2 is gone"):
            await groups[0].agree([Miss()])
        assert len(caplog.records) == 1
        assert groups[0].statistics().given_up == 1
        assert "given up" in repr(groups[0])


@pytest.mark.asyncio
async def test_an_error_of_its_own_goes_before_that_of_the_group() -> None:
    async with several(2) as (ranks, groups):
        ranks.lose(1)
        with pytest.raises(TypeError, match="request 0 of a batch is a Hit, Miss or Failed"):
            await groups[0].agree(["nonsense"])  # type: ignore[list-item]
        with pytest.raises(PeerLostError):
            await groups[0].agree([Miss()])
        with pytest.raises(PeerLostError):
            async with groups[0].batch(1):
                pytest.fail("nothing can be entered")


@pytest.mark.asyncio
async def test_what_was_met_goes_on_although_the_group_was_lost_meanwhile() -> None:
    async with several(2) as (ranks, groups):
        ranks.lose(1)
        with pytest.raises(MemoryError):
            async with groups[0].batch(1):
                raise MemoryError
        await asyncio.sleep(0.05)
        async with several(2) as (_, others):
            with pytest.raises(MemoryError):
                async with others[0].batch(1):
                    others[0].close()
                    raise MemoryError


def test_a_group_belongs_to_one_loop() -> None:
    with groups_of(MemoryRanks(1)) as (group,):

        async def use() -> None:
            assert await group.agree([Miss()]) == [Miss()]

        async def misuse() -> None:
            with pytest.raises(LocalProtocolError, match="the loop that used it first"):
                await group.agree([Miss()])
            group.close()

        with asyncio.Runner() as first:
            first.run(use())
            with asyncio.Runner() as second:
                second.run(misuse())


# -- who waits, and who doesn't


@pytest.mark.asyncio
async def test_who_is_cancelled_before_it_ran_has_entered_and_leaves_the_place_to_the_next() -> None:
    async with several(2) as (ranks, groups):
        tasks = [asyncio.ensure_future(groups[0].agree([Hit(Blocks(4))]))]
        tasks[0].cancel()
        await asyncio.wait(tasks)
        assert ranks.entered(0) == 1
        tasks.append(asyncio.ensure_future(groups[0].agree([Hit(Blocks(8))])))
        assert await groups[1].agree([Hit(Blocks(9))]) == [Hit(Blocks(4))]
        assert await groups[1].agree([Hit(Blocks(9))]) == await tasks[1] == [Hit(Blocks(8))]


@pytest.mark.asyncio
async def test_an_answer_that_is_closed_leaves_the_place_to_the_next() -> None:
    async with several(2) as (_, groups):
        groups[0].agree([Hit(Blocks(4))]).close()
        second = asyncio.ensure_future(groups[0].agree([Miss()]))
        assert await groups[1].agree([Hit(Blocks(9))]) == [Hit(Blocks(4))]
        assert await groups[1].agree([Miss()]) == await second == [Miss()]


@pytest.mark.asyncio
async def test_of_two_at_once_the_second_is_refused_and_the_first_goes_on() -> None:
    async with several(1) as (_, (group,)):
        first, second = await asyncio.gather(
            group.agree([Miss()]), group.agree([Miss()]), return_exceptions=True
        )
        assert first == [Miss()]
        assert isinstance(second, BusyError)


def test_a_batch_that_no_loop_was_there_for_is_entered_once_there_is_one() -> None:
    ranks = MemoryRanks(1)
    with groups_of(ranks) as (group,):
        answer = group.agree([Hit(Blocks(2))])
        assert not ranks.reductions
        assert asyncio.run(answer) == [Hit(Blocks(2))]  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_nothing_is_reported_of_what_nobody_waits_for() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with several(2) as (ranks, groups):
        ranks.lose(1)
        ranks.lose(0)  # so that nothing can even be begun
        with pytest.raises(MemoryError):
            async with groups[0].batch(1):
                raise MemoryError
        late = asyncio.ensure_future(groups[1].agree([Miss()]))
        late.cancel()
        await asyncio.wait([late])
        gc.collect()
        await asyncio.sleep(0)
        assert not reported


@pytest.mark.asyncio
async def test_an_empty_batch_with_keys_is_refused_without_a_word() -> None:
    async with several(2) as (ranks, groups):
        with pytest.raises(ValueError, match="1 keys for 0 requests"):
            await groups[0].agree([], keys=[b"a"])
        assert await groups[1].agree([]) == []
        assert not ranks.reductions
        assert await asyncio.gather(*(group.agree([Miss()]) for group in groups)) == [[Miss()]] * 2


# -- what is put together in a block


@pytest.mark.asyncio
async def test_a_block_holds_its_turn() -> None:
    async with several(1) as (_, (group,)):
        async with group.batch(2) as batch:
            assert list(batch) == [Miss(), Miss()] and len(batch) == 2
            with pytest.raises(LocalProtocolError, match="before the block is left"):
                _ = batch.agreed
            for second in (group.agree([]), group.batch(1).__aenter__()):
                with pytest.raises(BusyError):
                    await second
            batch[1] = Hit(Tokens(3))
        assert batch.agreed == [Miss(), Hit(Tokens(3))]
        with pytest.raises(MemoryError):
            async with batch:
                raise MemoryError
        with pytest.raises(LocalProtocolError, match="before the block is left, and then only normally"):
            _ = batch.agreed
        with pytest.raises(ValueError, match="number of requests"):
            group.batch(-1)


@pytest.mark.asyncio
async def test_who_is_cancelled_while_waiting_leaves_the_place_to_the_next() -> None:
    async with several(2) as (ranks, groups):
        first = asyncio.ensure_future(groups[0].agree([Hit(Blocks(4))]))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await groups[0].agree([Miss()])
        first.cancel()
        await asyncio.wait([first])
        next_one = asyncio.ensure_future(groups[0].agree([Hit(Blocks(8))]))
        await asyncio.sleep(0)
        assert ranks.entered(0) == 1  # one after another
        with pytest.raises(BusyError):
            await groups[0].agree([Miss()])
        assert await groups[1].agree([Hit(Blocks(9))]) == [Hit(Blocks(4))]
        assert await groups[1].agree([Hit(Blocks(9))]) == await next_one == [Hit(Blocks(8))]


# -- turns


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), count=st.integers(1, 12))
def test_turns_are_agreed_on_in_their_order_whenever_they_are_entered(
    seed: int, size: int, count: int
) -> None:
    draw = random.Random(seed)
    requests = [draw.choice([0, 1, 1, 2, REQUESTS + 1]) for _ in range(count)]
    fates = [[draw.choice(["", "", "", "fails", "cancelled"]) for _ in range(count)] for _ in range(size)]

    async def one(group: RankGroup, number: int, pace: random.Random) -> None:
        fate, wanted = fates[group.rank][number], requests[number]
        turn = group.turn(wanted, keys=[b"%d" % number] * wanted)
        await asyncio.sleep(pace.choice([0, 0.001, 0.1]))
        if fate == "fails":
            turn.fail(CapacityError("no room"))
            return
        entered = turn.enter([Hit(Blocks(number + 1 + group.rank))] * wanted)
        if fate == "cancelled":
            entered.cancel()
            return
        failed = any(column[number] == "fails" for column in fates)
        agreed: Outcome = Failed(Severity.CAPACITY) if failed else Hit(Blocks(number + 1))
        assert await entered == [agreed] * wanted
        assert await turn.enter([Miss()]) == [agreed] * wanted  # too late to count

    async def rank(group: RankGroup) -> None:
        pace = random.Random(seed + group.rank)
        # A task each; tasks begin in the order in which they were made.
        await asyncio.gather(*(one(group, number, pace) for number in range(count)))

    async def play(ranks: MemoryRanks, groups: list[RankGroup]) -> None:
        await asyncio.gather(*map(rank, groups))
        while any(group.statistics().agreed < count for group in groups):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        assert ranks.reductions == sum(-(-wanted // REQUESTS) for wanted in requests)

    virtually(seed, size, play)


@pytest.mark.asyncio
async def test_as_long_as_turns_are_taken_others_are_refused() -> None:
    async with several(1) as (_, (group,)):
        first, second = group.turn(), group.turn()
        late = second.enter([Hit(Blocks(2))])
        for other in (group.agree([Miss()]), group.batch(1).__aenter__()):
            with pytest.raises(BusyError):
                await other
        assert await first.enter([Miss()]) == [Miss()]
        assert await late == [Hit(Blocks(2))]
        async with group.batch(1):
            with pytest.raises(BusyError):
                group.turn()


@pytest.mark.asyncio
async def test_turns_end_with_the_group_and_one_that_is_never_entered_costs_the_deadline() -> None:
    async with several(1, deadline=0.01) as (ranks, (group,)):
        first, second = group.turn(), group.turn()
        with pytest.raises(DeadlineExceeded):
            await second.enter([Miss()])
        with pytest.raises(DeadlineExceeded):
            await first.enter([Miss()])
        with pytest.raises(PeerLostError):
            group.turn()
        first.fail(MemoryError())
        assert not ranks.reductions


@pytest.mark.asyncio
async def test_turns_go_on_from_the_highest_number_where_a_rank_left_one_out() -> None:
    async with several(2) as (_, groups):
        await groups[1].agree([])
        turns = [[group.turn(keys=[b"%d" % number]) for number in range(3)] for group in groups]
        answers = [turn.enter([Hit(Blocks(1))]) for side in turns for turn in side]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert [isinstance(each, LocalProtocolError) for each in found] == [True, False, False] * 2


@pytest.mark.asyncio
async def test_statistics_tell_what_was_done() -> None:
    async with several(2) as (_, groups):
        assert groups[0].statistics().poller is None
        await asyncio.gather(*(group.agree([Miss()]) for group in groups))
        await asyncio.gather(*(group.agree([]) for group in groups))
        differing = (group.agree([Miss()] * (1 + group.rank)) for group in groups)
        assert all(await asyncio.gather(*differing, return_exceptions=True))
        found = groups[0].statistics()
        assert (found.agreed, found.differed, found.given_up, found.rounds) == (2, 1, 0, 2)
        assert found.poller is not None and found.poller.pending == 0
