"""``RankGroup``: the ranks of a group agree on what a batch of requests comes to, and no loop waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiokv.device.poller import CompletionPoller, PollerStatistics
from aiokv.ranks.answer import Answer
from aiokv.ranks.backend import collective_of
from aiokv.ranks.base import Collective
from aiokv.ranks.batch import Batch
from aiokv.ranks.outcomes import Outcome
from aiokv.ranks.rounds import Rounds
from aiokv.ranks.turn import Turn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RankGroup", "RankStatistics"]

#: The longest deadline (s).
_LONGEST_S = 86_400


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """What a ``RankGroup`` did since it was made, on this rank."""

    #: Batches that were agreed on, the empty ones included.
    agreed: int
    #: Batches that the ranks could not agree on: they came with different ones, or with one that was faulty.
    differed: int
    #: Batches that ended with the group: a deadline was over, or a rank was lost.
    given_up: int
    #: Reductions; a batch takes one for each 256 requests, and an empty one none.
    rounds: int
    #: How completions were waited for; None before the first batch.
    poller: PollerStatistics | None


class RankGroup:
    """Lets the ranks of a tensor-parallel (or any other) group agree on batches of requests.

    Each rank brings what it found itself, and all get the same answer::

        ranks = aiokv.RankGroup(process_group)
        agreed = await ranks.agree([Hit(Blocks(12)), Miss(), Failed(Severity.TIMEOUT)], keys=ids)

    For each request the answer is the smallest count of all ranks; where one has nothing, a miss; where one
    failed, the worst error. Requests of a batch fail one by one. What a rank has beyond the answer is its own
    to release.

    **Every rank enters each batch exactly once, in the same order**, as with any collective: also with
    nothing found, after an error and when it was cancelled. ``batch`` sees to that for code that may raise.
    Once a batch is entered it is reduced on this rank, too, whoever still waits: a task that is cancelled
    while it waits changes nothing for the other ranks, and the next batch follows in its turn.

    Ranks that come with different batches all get the same error, which names the difference, and the group
    goes on. What is compared is the number of requests, the unit, how many batches came before, and the
    ``keys``: without them a rank that left a batch out goes unnoticed as long as sizes fit.

    After a deadline, or the loss of a rank, the group is given up on this rank, and so are its buffers, which
    the backend may still write to: every later call raises PeerLostError. A rank that came so late that
    others had given up may be told that all agreed; it hears of it with the next batch. With the ranks that
    are left, make a new process group and a new ``RankGroup``. What goes on in the old one is its backend's
    business: gloo ends it within two seconds after the deadline; an NCCL group has to be aborted
    (``process_group.abort()``, not on the loop), or else torch's watchdog ends the process.

    Making one may block, since it allocates (for NCCL pinned and GPU memory): make it where no loop waits. It
    belongs to the loop on which ``agree`` is called first. ``close`` it, or use it as a context manager.

    Args:
        process_group: A group of torch.distributed with a backend of gloo or NCCL, which this process is in
            and which carries nothing else meanwhile; None: torch's default group. Stays the caller's. Or
            what else reduces a vector: a ``Collective``.
        deadline: How long one batch may take at most, in seconds, where the call doesn't say.
        poller: Makes what waits for reductions, from the loop.

    Raises:
        TypeError: It is no process group that this process is in.
        ValueError: Another backend, or a deadline that is none.
        ClosedError: The group was destroyed, or torch.distributed isn't initialized.
        DeviceError: The GPU of an NCCL group can't be used.
    """

    def __init__(
        self,
        process_group: ProcessGroup | Collective | None = None,
        *,
        deadline: float = 30.0,
        poller: Callable[[asyncio.AbstractEventLoop], CompletionPoller] | None = None,
    ) -> None:
        self._deadline_s = _seconds(deadline)
        collective = collective_of(process_group)
        #: Of this process, within the group.
        self.rank = collective.rank
        #: Ranks of the group.
        self.size = collective.size
        self._rounds = Rounds(collective, poller or partial(CompletionPoller, guard=collective.guard))

    def __repr__(self) -> str:
        state = " closed" if self._rounds.closed else " given up" if self._rounds.lost else ""
        return f"<RankGroup rank {self.rank} of {self.size}{state}>"

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def agree(
        self,
        outcomes: Sequence[Outcome],
        *,
        keys: Iterable[bytes] | None = None,
        deadline: float | None = None,
    ) -> Coroutine[Any, Any, list[Outcome]]:
        """Bring what this rank found, and wait for what all ranks come to.

        The batch is entered by the call, and the answer is awaited: whoever makes a task of it and cancels
        that, however soon, has entered.

        An empty batch is empty on every rank; it is agreed on without a word.

        Args:
            outcomes: One for each request; all counts in blocks, or all in tokens.
            keys: What the requests are, the same on all ranks: one for each.
            deadline: Seconds from now; the group's by default.

        Returns:
            One outcome for each request, the same on every rank. None of them is a hit of nothing.

        Raises:
            LocalProtocolError: The ranks came with different batches; on all of them. Or this is another loop
                than before; on this rank alone.
            RemoteProtocolError: Another rank's batch can't be agreed on; on all ranks but that one.
            TypeError, ValueError: This rank's can't, which the others were told.
            DeadlineExceeded: Not all ranks came in time; the group is given up.
            PeerLostError: A rank was lost; the group is given up. Or that was so before.
            BusyError: Another task is at it; nothing was entered.
            ClosedError: It was closed, or the process group was destroyed.
        """
        return Answer(partial(self._rounds.enter, outcomes, keys, self._seconds(deadline)))

    def batch(
        self, size: int, *, keys: Iterable[bytes] | None = None, deadline: float | None = None
    ) -> Batch:
        """A batch that this rank enters once, whatever happens in it.

        ::

            async with ranks.batch(len(requests), keys=ids) as batch:
                for number, request in enumerate(requests):
                    batch[number] = await look_up(request)
            batch.agreed

        Args:
            size: Requests of the batch, the same on all ranks.
            keys: As for ``agree``.
            deadline: As for ``agree``; from when the block is left.
        """
        return Batch(self._rounds, size, keys, self._seconds(deadline))

    def turn(
        self, size: int = 1, *, keys: Iterable[bytes] | None = None, deadline: float | None = None
    ) -> Turn:
        """The next place in the order of batches, for whoever has several at once in a known order.

        Turns are reduced in the order in which they were taken, which has to be the same on all ranks,
        whenever each is entered: those behind one that isn't entered yet wait for it. So every turn has to be
        entered, or ``fail``. As long as one is waited for, ``agree`` and ``batch`` are refused.

        Args:
            size: Requests of the batch, the same on all ranks.
            keys: As for ``agree``.
            deadline: As for ``agree``; from when it is entered.

        Raises:
            AiokvError: As of ``agree``, on this rank alone; BusyError only while a ``batch`` is open.
        """
        return Turn(self._rounds, size, keys, self._seconds(deadline))

    def statistics(self) -> RankStatistics:
        """A snapshot of what was done so far."""
        rounds = self._rounds
        return RankStatistics(
            agreed=rounds.agreed,
            differed=rounds.differed,
            given_up=rounds.given_up,
            rounds=rounds.rounds,
            poller=rounds.poller.statistics if rounds.poller is not None else None,
        )

    def close(self) -> None:
        """Give the group up; who waits gets ClosedError. The process group stays. May be called twice.

        Other ranks that wait for this one run into their deadlines, so close when all have what they want.
        """
        self._rounds.close()

    def _seconds(self, deadline: float | None) -> float:
        return self._deadline_s if deadline is None else _seconds(deadline)


def _seconds(deadline: float) -> float:
    """A deadline, checked."""
    if not 0 < deadline <= _LONGEST_S:
        raise ValueError(f"deadline is a number of seconds up to a day, not {deadline!r}")
    return float(deadline)
