"""What every group of ranks must do, as one suite of async functions that each rank runs.

On whatever reduces, in one process or in many: each rank makes a ``RankGroup`` and runs each of ``CASES``
with it, in the same order on all of them. What a rank brings is worked out from its number, and what has to
come of it from all numbers, so that nothing needs to be told between them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from aiokv.errors import BusyError, LocalProtocolError, RemoteProtocolError
from aiokv.ranks.group import RankGroup
from aiokv.ranks.outcomes import Failed, Hit, Miss, Outcome, Severity
from aiokv.ranks.units import MOST, Blocks, Tokens
from aiokv.ranks.vector import REQUESTS

__all__ = ["CASES", "Case", "drawn", "expected"]

Case = Callable[[RankGroup], Awaitable[None]]

_SEVERITIES = list(Severity)


def drawn(seed: int, rank: int, size: int) -> list[Outcome]:
    """What a rank brings to a batch of ``size``, drawn."""
    found = random.Random(f"{seed} {rank}")  # noqa: S311 - not a secret
    outcomes: list[Outcome] = []
    for number in range(size):
        choices: list[Outcome] = [
            Hit(Blocks(found.choice([0, 1, found.randint(0, 50), MOST]))),
            Hit(Blocks(found.randint(1, 50))),
            Hit(Blocks(7)),
            Miss(),
            Failed(found.choice(_SEVERITIES)),
        ]
        # Two of three requests are hits on all ranks, or else next to nothing would be agreed to be there.
        outcomes.append(found.choice(choices if number % 3 == 0 else choices[:3]))
    return outcomes


def expected(brought: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """What ranks have to come to that brought these, request by request, the slow way."""
    agreed: list[Outcome] = []
    for column in zip(*brought, strict=True):
        failures = [outcome.severity for outcome in column if isinstance(outcome, Failed)]
        held = [outcome.held for outcome in column if isinstance(outcome, Hit)]
        if failures:
            agreed.append(Failed(max(failures)))
        elif len(held) < len(column) or not min(each.count for each in held):
            agreed.append(Miss())
        else:
            agreed.append(Hit(min(held, key=lambda each: each.count)))
    return agreed


async def answers_are_the_least_of_all(ranks: RankGroup) -> None:
    """Counts are minimized, errors kept apart from nothing, each request for itself."""
    for seed, size in enumerate((1, 2, 3, 17, 64)):
        brought = [drawn(seed, rank, size) for rank in range(ranks.size)]
        agreed = await ranks.agree(brought[ranks.rank])
        assert agreed == expected(brought)


async def every_request_is_agreed_on(ranks: RankGroup) -> None:
    """Not the last one only: each rank has less than the others at another place."""
    brought: list[Outcome] = [Hit(Blocks(100))] * (ranks.size + 1)
    brought[ranks.rank] = Hit(Blocks(ranks.rank + 1))
    agreed = await ranks.agree(brought)
    assert agreed == [*(Hit(Blocks(rank + 1)) for rank in range(ranks.size)), Hit(Blocks(100))]


async def a_rank_without_a_hit_enters_all_the_same(ranks: RankGroup) -> None:
    """One rank has nothing for any request."""
    last = ranks.rank == ranks.size - 1
    agreed = await ranks.agree([Miss() if last else Hit(Blocks(3))] * 5)
    assert agreed == [Miss()] * 5


async def errors_keep_their_kinds(ranks: RankGroup) -> None:
    """The worst one counts, and only where there is one."""
    own: list[Outcome] = [Miss(), Hit(Blocks(2)), Hit(Blocks(2))]
    if ranks.rank == 0:
        own[:2] = [Failed(Severity.TIMEOUT), Failed(Severity.CAPACITY)]
    if ranks.rank == ranks.size - 1:
        own[0] = Failed(Severity.CAPACITY)
    assert await ranks.agree(own) == [
        Failed(Severity.CAPACITY),
        Failed(Severity.CAPACITY),
        Hit(Blocks(2)),
    ]


async def tokens_stay_tokens(ranks: RankGroup) -> None:
    """The answer has the unit of the question."""
    assert await ranks.agree([Hit(Tokens(512 + ranks.rank)), Miss()]) == [Hit(Tokens(512)), Miss()]


async def long_batches_take_rounds(ranks: RankGroup) -> None:
    """As many as it needs, and no more."""
    for size, rounds in ((REQUESTS, 1), (REQUESTS + 1, 2), (3 * REQUESTS - 1, 3)):
        before = ranks.statistics().rounds
        brought = [drawn(size, rank, size) for rank in range(ranks.size)]
        assert await ranks.agree(brought[ranks.rank]) == expected(brought)
        assert ranks.statistics().rounds == before + rounds


async def an_empty_batch_is_nothing_to_talk_about(ranks: RankGroup) -> None:
    """Without a reduction, and it doesn't put the ranks out of step."""
    before = ranks.statistics().rounds
    assert await ranks.agree([]) == []
    assert ranks.statistics().rounds == before
    assert await ranks.agree([Miss()]) == [Miss()]


async def other_sizes_are_named(ranks: RankGroup) -> None:
    """One rank comes with one request more: all are told, none hangs, and the group goes on."""
    if ranks.size == 1:
        return
    more = ranks.rank == ranks.size - 1
    error = await _differ(ranks, [Miss()] * (4 if more else 3))
    assert f"requests 3 to 4 ({4 if more else 3} on this rank)" in str(error)


async def other_keys_are_noticed(ranks: RankGroup) -> None:
    """One rank is at another batch of the same size."""
    keys = [b"a", b"bc"]
    assert await ranks.agree([Miss()] * 2, keys=keys) == [Miss()] * 2
    if ranks.size > 1:
        if ranks.rank == 0:
            keys = [b"ab", b"c"]
        assert "other keys" in str(await _differ(ranks, [Miss()] * 2, keys))


async def other_units_are_noticed(ranks: RankGroup) -> None:
    """One rank counts tokens: they are not compared with blocks."""
    if ranks.size > 1:
        held = Tokens(32) if ranks.rank == 0 else Blocks(2)
        assert "blocks or tokens" in str(await _differ(ranks, [Hit(held), Miss()]))


async def a_batch_that_one_left_out_is_noticed(ranks: RankGroup) -> None:
    """An empty batch counts, so that a rank that had none stands out at the next."""
    if ranks.size > 1:
        if ranks.rank:
            await ranks.agree([])
        assert "batch number" in str(await _differ(ranks, [Miss()]))


async def a_rank_that_enters_twice_is_noticed(ranks: RankGroup) -> None:
    """One rank is a batch behind: it enters the same one again."""
    for number in range(2):
        again = number == 1 and ranks.rank == ranks.size - 1
        keys = [b"batch %d" % (0 if again else number)]
        if not number or ranks.size == 1:
            assert await ranks.agree([Miss()], keys=keys) == [Miss()]
        else:
            assert "other keys" in str(await _differ(ranks, [Miss()], keys))


async def what_can_not_be_agreed_on_is_told_to_all(ranks: RankGroup) -> None:
    """A rank with bad input enters all the same, or the others would wait for it."""
    bad: list[tuple[list[Outcome], list[bytes] | None, type[Exception]]] = [
        ([Hit(Blocks(1)), Hit(Tokens(16))], None, TypeError),
        ([Hit(3)], None, TypeError),  # type: ignore[arg-type]
        ([None], None, TypeError),  # type: ignore[list-item]
        ([Miss()], [b"one", b"two"], ValueError),
        ([Miss()], ["text"], TypeError),  # type: ignore[list-item]
    ]
    for outcomes, keys, error in bad:
        own = ranks.rank == ranks.size - 1
        try:
            if own:
                await ranks.agree(outcomes, keys=keys)
            else:
                await ranks.agree([Miss()])
        except error:
            assert own
        except RemoteProtocolError as remote:
            told = str(remote)
            assert not own
            assert f"rank {ranks.size - 1}" in told
        else:
            raise AssertionError("nobody was told")
    assert await ranks.agree([Miss()]) == [Miss()]


async def late_ranks_are_waited_for(ranks: RankGroup) -> None:
    """Each is the last once."""
    for late in range(ranks.size):
        if ranks.rank == late:
            await asyncio.sleep(0.003)
        assert await ranks.agree([Hit(Blocks(late + 1))]) == [Hit(Blocks(late + 1))]


async def an_exception_enters_all_requests_as_failed(ranks: RankGroup) -> None:
    """The rank that met it gets it back, and the others the kind."""
    try:
        async with ranks.batch(3) as batch:
            batch[0] = Hit(Blocks(4))
            if ranks.rank == 0:
                raise MemoryError("no room")
        assert ranks.rank
        assert batch.agreed == [Failed(Severity.CAPACITY)] * 3
    except MemoryError:
        assert not ranks.rank
    assert await ranks.agree([Hit(Blocks(1))]) == [Hit(Blocks(1))]


async def who_is_cancelled_enters_all_the_same(ranks: RankGroup) -> None:
    """While it looks, and while it waits for the others; the next batch follows."""

    async def look() -> None:
        async with ranks.batch(2) as batch:
            batch[0] = Hit(Blocks(4))
            if ranks.rank == 0:
                await asyncio.Event().wait()

    looking = asyncio.ensure_future(look())
    await asyncio.sleep(0)
    if ranks.rank == 0:
        looking.cancel()
    await asyncio.wait([looking])
    assert looking.cancelled() == (ranks.rank == 0)

    waiting = asyncio.ensure_future(ranks.agree([Hit(Blocks(2))] * (REQUESTS + 1)))
    await asyncio.sleep(0)
    if ranks.rank == 0:
        waiting.cancel()
    agreed = await ranks.agree([Hit(Blocks(9 + ranks.rank))]) if ranks.rank == 0 else None
    await asyncio.wait([waiting])
    if ranks.rank:
        assert await waiting == [Hit(Blocks(2))] * (REQUESTS + 1)
        agreed = await ranks.agree([Hit(Blocks(9 + ranks.rank))])
    assert agreed == [Hit(Blocks(9))]


async def one_batch_at_a_time(ranks: RankGroup) -> None:
    """Whoever comes second on a rank is refused, and nothing is entered for it."""
    first = asyncio.ensure_future(ranks.agree([Hit(Blocks(5))]))
    await asyncio.sleep(0)
    if not first.done():
        try:
            await ranks.agree([Miss()])
        except BusyError:
            pass
        else:
            raise AssertionError("two batches at once")
    assert await first == [Hit(Blocks(5))]
    async with ranks.batch(1) as batch:
        try:
            await ranks.agree([Miss()])
        except BusyError:
            batch[0] = Hit(Blocks(6))
    assert batch.agreed == [Hit(Blocks(6))]


async def _differ(
    ranks: RankGroup, outcomes: Sequence[Outcome], keys: Sequence[bytes] | None = None
) -> LocalProtocolError:
    """Agree on what can't be agreed on, and see that the group goes on."""
    try:
        await ranks.agree(outcomes, keys=keys)
    except LocalProtocolError as error:
        assert await ranks.agree([Hit(Blocks(1))]) == [Hit(Blocks(1))]
        return error
    raise AssertionError("the difference went unnoticed")


CASES: tuple[Case, ...] = (
    answers_are_the_least_of_all,
    every_request_is_agreed_on,
    a_rank_without_a_hit_enters_all_the_same,
    errors_keep_their_kinds,
    tokens_stay_tokens,
    long_batches_take_rounds,
    an_empty_batch_is_nothing_to_talk_about,
    other_sizes_are_named,
    other_keys_are_noticed,
    other_units_are_noticed,
    a_batch_that_one_left_out_is_noticed,
    a_rank_that_enters_twice_is_noticed,
    what_can_not_be_agreed_on_is_told_to_all,
    late_ranks_are_waited_for,
    an_exception_enters_all_requests_as_failed,
    who_is_cancelled_enters_all_the_same,
    one_batch_at_a_time,
)
