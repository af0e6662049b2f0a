"""The scheduler's side of the host tier: what is copied there, and what is brought back.

A block is copied once a step has filled it. vLLM holds nothing for that: when it gives a block that is still
being read to somebody else, the step that writes there begins with the end of the reading. What is in the
tiers is known from the workers' reports, which are a step late; where that was wrong, the request computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from aiokv.integrations.vllm.asking import Asking
from aiokv.integrations.vllm.news import Emptied, Gone, Kept, Missed, News
from aiokv.integrations.vllm.orders import Keep, Orders, Recall
from aiokv.integrations.vllm.residents import Residents
from aiokv.integrations.vllm.stretches import Stretches
from aiokv.offload.events import BlocksRemoved, BlocksStored, stored

__all__ = ["Keeping", "Lora", "Request", "TierChange"]

K = TypeVar("K")


class Lora(Protocol):
    """What is read of vLLM's ``LoRARequest``."""

    @property
    def adapter_id(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """Its name."""


class Request(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    num_computed_tokens: int
    #: Of each block that its tokens fill, those that came before included.
    block_hashes: list[bytes]
    lora_request: Lora | None

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Its tokens, those that it made included."""


@dataclass(frozen=True, slots=True)
class TierChange:
    """Something came to be in the tiers of all ranks, or is no longer.

    Attributes:
        event: What.
        lora: Whose tokens were stored; None without an adapter, and of what was removed.
    """

    event: BlocksStored | BlocksRemoved
    lora: Lora | None = None


@dataclass(slots=True)
class _Tracked:
    """A request that has blocks, of each group, and the first stretch that was not looked at yet."""

    request: Request
    blocks: list[list[int]]
    next: int = 0


@dataclass(slots=True)
class _Going:
    """A ``Keep`` that not all ranks have reported."""

    keep: Keep
    left: int
    tokens: list[int] | None
    lora: Lora | None


class Keeping:
    """Decides for one instance, beside its scheduler. It does no I/O.

    Args:
        stretches: What a block of the tiers is.
        ranks: Workers of the instance.
        events: Whether anybody reads ``take_changes``.

    Attributes:
        asking: Finds what others have stored in a pool; None where the tiers are this instance's own.
    """

    def __init__(self, stretches: Stretches, ranks: int = 1, *, events: bool = False) -> None:
        self.asking: Asking | None = None
        self._stretches = stretches
        self._size = stretches.tokens
        self._ranks = ranks
        self._residents = Residents(ranks)
        self._tracked: dict[str, _Tracked] = {}
        self._number = 0
        self._going: dict[int, _Going] = {}
        #: Which ``Keep`` reads a block of the cache, by block id; the last one that was ordered.
        self._reading: dict[int, int] = {}
        #: Which ``Keep`` brings a block to the tiers, by hash.
        self._storing: dict[bytes, int] = {}
        #: Blocks that are on their way back, by request, and for whom, by hash.
        self._recalls: dict[str, Sequence[bytes]] = {}
        self._recalling: dict[bytes, str] = {}
        #: Requests whose recall did not bring all: they compute.
        self._missed: set[str] = set()
        #: Resets so far, and the last that each rank has said to be done.
        self._resets = 0
        self._heard = [0] * ranks
        self._changes: list[TierChange] | None = [] if events else None

    # -- a request comes

    def arrived(self, request: Request) -> None:
        """A request was added; it will be asked what is found for it."""
        if self.asking is not None:
            hashes = self._stretches.hashes(request.block_hashes)
            self.asking.begin(request.request_id, hashes, self._residents.prefix(hashes, 0))

    def found(self, request: Request, computed: int) -> int | None:
        """Tokens behind ``computed`` that are in the tiers. Changes nothing to be seen.

        Returns:
            None while it is not known what a pool has, or some of them are on their way already for a request
            that came before: to be asked again, as these will be in vLLM's own cache then.
        """
        hashes, first = self._stretches.hashes(request.block_hashes), computed // self._size
        if request.request_id in self._missed or computed % self._size:
            return 0
        if any(self._stretches.windows):
            # Of the last token, which is computed in any case, the window begins a token earlier.
            hashes = hashes[: (len(request.all_token_ids) - 1) // self._size]
        end = self._residents.prefix(hashes, first)
        if self.asking is not None:
            self.asking.begin(request.request_id, hashes, end)
            there = self.asking.found(request.request_id, hashes, end)
            if there is None:
                return None
            self._learn(request, there)
            end = self._residents.prefix(hashes, first)
        if self._recalling and any(block in self._recalling for block in hashes[first:end]):
            return None
        return max(0, end - first) * self._size

    def _learn(self, request: Request, there: range) -> None:
        """These blocks of a request are in the pool, whoever stored them."""
        hashes, size = self._stretches.hashes(request.block_hashes), self._size
        new: set[bytes] = set()
        for rank in range(self._ranks):
            new.update(self._residents.add(hashes[there.start : there.stop], rank))
        if self._changes is None or not new:
            return
        tokens = list(request.all_token_ids[: there.stop * size])
        indices = [at for at in there if hashes[at] in new]
        events = stored(hashes[: there.stop], None, size, tokens, indices)
        self._changes.extend(TierChange(event, request.lora_request) for event in events)

    def begun(self, request: Request, blocks: Sequence[Sequence[int]]) -> None:
        """A request has blocks: all of them, in each group, from its first token on."""
        self._tracked[request.request_id] = _Tracked(request, [list(ids) for ids in blocks])

    def recall(
        self, request: Request, blocks: Sequence[Sequence[int]], first: int, last: int
    ) -> Recall | None:
        """Bring back what the tiers have of the tokens from ``first`` up to ``last``.

        Args:
            request: The request.
            blocks: Its blocks, in each group, from its first token on.
            first: First token that isn't here; begins a stretch.
            last: One behind the last token that it waits for.
        """
        name, begin = request.request_id, first // self._size
        hashes = self._stretches.hashes(request.block_hashes)
        end = min(self._residents.prefix(hashes, begin), last // self._size)
        if end <= begin or name in self._missed:
            return None
        picked = tuple(hashes[begin:end])
        self._recalls[name] = picked
        self._recalling.update(dict.fromkeys(picked, name))
        return Recall(name, picked, first, self._stretches.listed(blocks, begin, end))

    # -- each step

    def scheduled(self, name: str, tokens: int, new: Sequence[Sequence[int]], orders: Orders) -> None:
        """A request computes tokens in the step that is being put together.

        Args:
            name: The request.
            tokens: How many, behind its ``num_computed_tokens``.
            new: Blocks that it got for that since ``begun``, in each group; nothing where it got none.
            orders: Of this step.
        """
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        request, blocks = tracked.request, tracked.blocks
        for ids, more in zip(blocks, new, strict=bool(new)):
            ids.extend(more)
        if self._reading:
            written = self._stretches.written(blocks, request.num_computed_tokens)
            orders.fences.update(self._reading[block] for block in written if block in self._reading)
        full = self._stretches.filled(blocks, request.num_computed_tokens + tokens)
        hashes = self._stretches.hashes(request.block_hashes)
        full = min(full, len(hashes))
        if full > tracked.next:
            first, tracked.next = tracked.next, full
            orders.keeps.extend(self._keeps(tracked, hashes, first, full))

    def _keeps(self, tracked: _Tracked, hashes: Sequence[bytes], first: int, last: int) -> list[Keep]:
        """Orders for those stretches from ``first`` up to ``last`` that aren't in the tiers, run by run."""
        found, computed = [], tracked.request.num_computed_tokens
        begin = first
        for at in range(first, last + 1):
            if (
                at < last
                and hashes[at] not in self._residents
                and hashes[at] not in self._storing
                and self._stretches.reached(tracked.blocks, at, computed)
            ):
                continue
            if at > begin:
                found.append(self._keep(tracked, hashes, begin, at))
            begin = at + 1
        return found

    def _keep(self, tracked: _Tracked, hashes: Sequence[bytes], first: int, last: int) -> Keep:
        request, size = tracked.request, self._size
        self._number += 1
        picked, blocks = tuple(hashes[first:last]), self._stretches.blocks(tracked.blocks, first, last)
        keep = Keep(self._number, picked, blocks, hashes[first - 1] if first else None)
        tokens = None if self._changes is None else list(request.all_token_ids[first * size : last * size])
        self._going[keep.number] = _Going(keep, self._ranks, tokens, request.lora_request)
        # Blocks of different groups share memory, and their numbers: one has one user at a time.
        self._reading.update(dict.fromkeys(chain(*blocks), keep.number))
        self._storing.update(dict.fromkeys(picked, keep.number))
        return keep

    @property
    def pending(self) -> bool:
        """Whether a step is needed to learn what is in the tiers."""
        return bool(self._going)

    # -- what comes of it

    def finished(self, name: str) -> None:
        """A request is over; what is copied for it goes on."""
        self._tracked.pop(name, None)
        self._missed.discard(name)
        if self.asking is not None:
            self.asking.forget(name)

    def loaded(self, name: str) -> None:
        """A request's load is over, be it well or not."""
        for block in self._recalls.pop(name, ()):
            if self._recalling.get(block) == name:
                del self._recalling[block]

    def recalled(self, name: str) -> int:
        """Tokens that are on their way back for a request."""
        return len(self._recalls.get(name, ())) * self._size

    def told(self, news: News) -> None:
        """A worker said what changed."""
        for change in news.changes:
            if isinstance(change, Emptied):
                self._heard[news.rank] = change.reset
            elif isinstance(change, Kept):
                self._kept(change, news.rank)
            elif isinstance(change, Missed):
                if change.request in self._tracked:
                    self._missed.add(change.request)
            elif isinstance(change, Gone) and self._heard[news.rank] == self._resets:
                self._gone(change, news.rank)

    def _kept(self, kept: Kept, rank: int) -> None:
        going = self._going.get(kept.number)
        if going is None:
            return
        hashes = going.keep.hashes
        if self._heard[rank] == self._resets:
            there = set(self._residents.add(hashes[: kept.count], rank))
            if self._changes is not None and there:
                indices = [at for at, block in enumerate(hashes) if block in there]
                events = stored(hashes, going.keep.parent, self._size, going.tokens, indices)
                self._changes.extend(TierChange(event, going.lora) for event in events)
        going.left -= 1
        if not going.left:
            del self._going[kept.number]
            _forget(self._reading, chain(*going.keep.blocks), kept.number)
            _forget(self._storing, hashes, kept.number)

    def _gone(self, gone: Gone, rank: int) -> None:
        residents = self._residents
        hashes = residents.lose(rank) if gone.hashes is None else residents.discard(gone.hashes, rank)
        self._tell_removed(hashes, "evicted")

    def reset(self) -> tuple[int, bool]:
        """Nothing that is in the tiers now will be found any more.

        Returns:
            The number of the reset, for the workers, and whether nothing is on its way back, whose request
            would go on with what was there before.
        """
        self._resets += 1
        self._storing.clear()
        if self.asking is not None:
            self.asking.reset()
        self._tell_removed(self._residents.clear(), "reset")
        return self._resets, not self._recalls

    def _tell_removed(self, hashes: Sequence[bytes], why: str) -> None:
        if self._changes is not None and hashes:
            self._changes.append(TierChange(BlocksRemoved(tuple(hashes), why)))

    def take_changes(self) -> list[TierChange]:
        """What changed since the last call; nothing where nobody was to read it."""
        if not self._changes:
            return []
        found, self._changes = self._changes, []
        return found


def _forget(numbers: dict[K, int], keys: Iterable[K], number: int) -> None:
    """Drop those entries that are still this number."""
    for key in keys:
        if numbers.get(key) == number:
            del numbers[key]
