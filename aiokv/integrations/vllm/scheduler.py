"""The scheduler's half: what a request loads, what it leaves for others, and which blocks are held meanwhile.

It decides and does no I/O. vLLM calls it between steps, always from one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from aiokv.integrations.vllm import keeping, leaving
from aiokv.integrations.vllm.asking import Asking
from aiokv.integrations.vllm.leaving import BlockIds, Leaving
from aiokv.integrations.vllm.news import News, Wanted
from aiokv.integrations.vllm.orders import Blocks, Load, Orders, Queued, Release, listed
from aiokv.integrations.vllm.params import Pull, pull_of

__all__ = ["Request", "SchedulerHalf"]

_log = logging.getLogger("aiokv")


class Request(keeping.Request, leaving.Request, Protocol):
    """What is read of vLLM's ``Request``."""


class SchedulerHalf:
    """Decides for all requests of one instance.

    Args:
        block_sizes: Tokens per block, for each KV cache group.
        leaving: Decides what requests leave for others.
        tier: Decides what the host tier does; None: there is none.

    Attributes:
        leaving: As given.
    """

    def __init__(
        self, block_sizes: Sequence[int], leaving: Leaving, tier: keeping.Keeping | None = None
    ) -> None:
        self.leaving = leaving
        self._tier = tier
        self._block_sizes = tuple(block_sizes)
        #: What each request is to load that has not begun to, or was found to have nothing to; by request.
        self._pulls: dict[str, Pull | None] = {}
        #: How many tokens each of them had when it was looked at last.
        self._computed: dict[str, int] = {}
        #: Requests whose load was ordered and isn't reported.
        self._loading: set[str] = set()
        #: Requests that had their load, or need none: a second one (after preemption) is computed.
        self._served: set[str] = set()
        self._orders = Orders()

    # -- a pool that others share

    def share(self, asking: Asking) -> None:
        """Blocks of others can be had, too."""
        if self._tier is not None:
            self._tier.asking = asking

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._tier is not None and self._tier.asking is not None:
            self._tier.asking.close()

    # -- a request comes

    def added(self, request: Request) -> None:
        """A request is in the queue, where it may wait for long."""
        pull = self._pull(request)
        if pull is not None:
            self._orders.queued.append(Queued(pull.ticket, pull.sources, pull.hold))
        if self._tier is not None:
            self._tier.arrived(request)

    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens beyond ``computed`` that can be loaded; None: ask again. Changes nothing to be seen."""
        pull = self._pull(request)
        there = 0 if self._tier is None else self._tier.found(request, computed)
        if there is None:
            return None
        self._computed[request.request_id] = computed
        return max(there, 0 if pull is None else _end(pull, request) - computed)

    def allocated(self, request: Request, blocks: BlockIds, external: int) -> None:
        """A request got its blocks. vLLM says so twice for one that loads; the second time with 0 tokens.

        Args:
            request: The request.
            blocks: Its blocks, in each group, from its first token on.
            external: Tokens to be loaded, behind those that ``matched`` was told of.
        """
        name, pull = request.request_id, self._pull(request)
        first = self._computed.pop(name, 0)
        end = first + max(0, external)
        if end > first:
            self._loading.add(name)
        self.leaving.begun(request, blocks)
        if self._tier is not None:
            self._tier.begun(request, blocks)
            recall = self._tier.recall(request, blocks, first, end)
            if recall is not None:
                self._orders.recalls.append(recall)
                first += self._tier.recalled(name)
        if pull is None:
            return
        self._served.add(name)
        self._pulls.pop(name, None)
        if end <= first:
            # All of it is here already, or in the host tier: the other side may let go (vllm#56640).
            self._orders.releases.append(Release(pull.ticket, pull.sources, pull.parts))
            return
        held = self._listed(blocks, first, end)
        # Who was told how much there is asks when all of it is.
        chunked = pull.tokens is None and bool(pull.sources) and pull.ticket.divisible
        self._orders.loads.append(
            Load(name, pull.ticket, pull.sources, held, first, end, pull.parts, chunked)
        )

    # -- a request goes

    def finished(
        self, request: Request, blocks: BlockIds, *, complete: bool
    ) -> tuple[bool, dict[str, object] | None]:
        """A request is over, by itself or because it was given up.

        Args:
            request: The request.
            blocks: Its blocks, in each group.
            complete: It was not given up.

        Returns:
            Whether the blocks are held until the worker reports them sent, and what the answer to the
            client carries for the decode side.
        """
        name, pull = request.request_id, self._pull(request)
        self._pulls.pop(name, None)
        self._computed.pop(name, None)
        self._served.discard(name)
        if self._tier is not None:
            self._tier.finished(name)
        if name in self._loading:
            self._loading.discard(name)
            self._orders.aborts.append(name)
        elif pull is not None:
            # It was given up in the queue: the other side need not hold its blocks for us (vllm#29906).
            self._orders.releases.append(Release(pull.ticket, pull.sources, pull.parts))
        return self.leaving.finished(request, blocks, self._orders, complete=complete)

    # -- each step

    @property
    def follows(self) -> bool:
        """Whether it needs to know what is scheduled in the next step, and what is preempted."""
        return self._tier is not None or self.leaving.follows

    def scheduled(self, name: str, tokens: int, new: BlockIds) -> None:
        """A request computes in the step that is being put together; see ``Keeping.scheduled``."""
        self.leaving.scheduled(name, tokens, new[0] if new else (), self._orders)
        if self._tier is not None:
            self._tier.scheduled(name, tokens, new, self._orders)

    def preempted(self, names: Iterable[str]) -> None:
        """The blocks of these requests were taken away, and may be written by the step to come."""
        self.leaving.preempted(names, self._orders)

    def orders(self) -> Orders:
        """What was decided since this was last asked."""
        orders, self._orders = self._orders, Orders()
        return orders

    @property
    def pending(self) -> bool:
        """Whether a step is needed although no request may need one."""
        return bool(self._orders) or (self._tier is not None and self._tier.pending)

    def reported(self, loaded: Iterable[str], news: Iterable[News] = ()) -> None:
        """The workers reported that these loads are over, and what else there is to be told."""
        self._loading.difference_update(loaded)
        for each in news:
            for change in each.changes:
                if isinstance(change, Wanted):
                    self.leaving.wanted(each.rank, change)
            if self._tier is not None:
                self._tier.told(each)
        if self._tier is None:
            return
        for name in loaded:
            self._tier.loaded(name)

    def reset(self) -> bool | None:
        """Empty the host tier; None where there is none.

        Returns:
            False if a request is waiting for blocks of before; it is emptied all the same.
        """
        if self._tier is None:
            return None
        self._orders.reset, well = self._tier.reset()
        return well

    def take_changes(self) -> list[keeping.TierChange]:
        """What changed in the host tiers, for those who read KV events."""
        return [] if self._tier is None else self._tier.take_changes()

    def sources(self, request: Request, tokens: int) -> tuple[int, int]:
        """How many of the tokens that a request waits for come from the host tier, how many from peers."""
        host = 0 if self._tier is None else min(tokens, self._tier.recalled(request.request_id))
        return host, tokens - host

    # -- within

    def _pull(self, request: Request) -> Pull | None:
        """What a request has yet to load; what its parameters say is read once."""
        name = request.request_id
        if name in self._served:
            return None
        if name not in self._pulls:
            params: Mapping[str, object] = request.kv_transfer_params or {}
            try:
                self._pulls[name] = pull_of(params)
            except (TypeError, ValueError) as error:
                _log.warning("request %s is computed here, since nothing can be loaded: %s", name, error)
                self._pulls[name] = None
        return self._pulls[name]

    def _listed(self, blocks: BlockIds, first: int, end: int) -> tuple[Blocks, ...]:
        pairs = zip(blocks, self._block_sizes, strict=True)
        return tuple(listed(ids, size, first, end) for ids, size in pairs)


def _end(pull: Pull, request: Request) -> int:
    """One behind the last token that can be loaded."""
    prompt = request.num_prompt_tokens
    return prompt if pull.tokens is None else min(prompt, pull.tokens)
