"""The scheduler's half: what a request loads, what it leaves for others, and which blocks are held meanwhile.

It decides and does no I/O. vLLM calls it between steps, always from one thread.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from aiokv.integrations.vllm.orders import Blocks, Load, Orders, Release, Send, Ticket, listed
from aiokv.integrations.vllm.params import Params, Pull, answer, minted, pull_of

__all__ = ["Request", "SchedulerHalf"]

_log = logging.getLogger("aiokv")

BlockIds = Sequence[Sequence[int]]


class Request(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    num_computed_tokens: int
    kv_transfer_params: dict[str, object] | None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""


class SchedulerHalf:
    """Decides for all requests of one instance.

    Args:
        block_sizes: Tokens per block, for each KV cache group.
        engine: Name of this instance.
        mint: Makes transfer ids, where no router did.
    """

    def __init__(
        self, block_sizes: Sequence[int], engine: str, mint: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._engine = engine
        self._mint = mint
        #: Addresses of this instance's ranks, in their order; empty until the workers are up.
        self.addresses: tuple[str, ...] = ()
        #: What each request is to load that has not begun to, or was found to have nothing to; by request.
        self._pulls: dict[str, Pull | None] = {}
        #: How many tokens each of them had when it was looked at last.
        self._computed: dict[str, int] = {}
        #: Requests whose load was ordered and isn't reported.
        self._loading: set[str] = set()
        #: Requests that had their load, or need none: a second one (after preemption) is computed.
        self._served: set[str] = set()
        self._orders = Orders()

    # -- a request comes

    def matched(self, request: Request, computed: int) -> int:
        """Tokens beyond ``computed`` that can be loaded. Changes nothing that can be seen."""
        pull = self._pull(request)
        if pull is None:
            return 0
        self._computed[request.request_id] = computed
        return max(0, _end(pull, request) - computed)

    def allocated(self, request: Request, blocks: BlockIds, external: int) -> None:
        """A request got its blocks. vLLM says so twice for one that loads; the second time with 0 tokens.

        Args:
            request: The request.
            blocks: Its blocks, in each group, from its first token on.
            external: Tokens to be loaded, behind those that ``matched`` was told of.
        """
        pull = self._pull(request)
        if pull is None:
            return
        self._served.add(request.request_id)
        self._pulls.pop(request.request_id, None)
        first = self._computed.pop(request.request_id, 0)
        if external <= 0:
            # All of it is here already: the other side may let go (vllm#56640).
            self._orders.releases.append(Release(pull.ticket, pull.sources))
            return
        end = first + external
        self._loading.add(request.request_id)
        self._orders.loads.append(
            Load(
                request=request.request_id,
                ticket=pull.ticket,
                sources=pull.sources,
                blocks=self._listed(blocks, first, end),
                first=first,
                tokens=end,
            )
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
        name, params = request.request_id, request.kv_transfer_params or {}
        pull = self._pull(request)
        self._pulls.pop(name, None)
        self._computed.pop(name, None)
        self._served.discard(name)
        if name in self._loading:
            self._loading.discard(name)
            self._orders.aborts.append(name)
        elif pull is not None:
            # It was given up in the queue: the other side need not hold its blocks for us (vllm#29906).
            self._orders.releases.append(Release(pull.ticket, pull.sources))
        if not params.get("do_remote_decode"):
            return False, None
        return self._leave(request, blocks, params, complete=complete)

    def _leave(
        self, request: Request, blocks: BlockIds, params: Params, *, complete: bool
    ) -> tuple[bool, dict[str, object] | None]:
        try:
            ticket = minted(params)
        except (TypeError, ValueError) as error:
            _log.warning("request %s leaves nothing for others: %s", request.request_id, error)
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        held = self._listed(blocks, 0, tokens)
        if not complete or tokens < request.num_prompt_tokens or not any(group.ids for group in held):
            if ticket is not None:
                self._orders.refusals.append(ticket)
            return False, None
        ticket = ticket or Ticket(self._mint())
        self._orders.sends.append(Send(request.request_id, ticket, held, tokens))
        return True, answer(ticket, self.addresses, tokens, self._engine)

    # -- each step

    def orders(self) -> Orders:
        """What was decided since this was last asked."""
        orders, self._orders = self._orders, Orders()
        return orders

    @property
    def pending(self) -> bool:
        """Whether a step is needed although no request may need one."""
        return bool(self._orders)

    def reported(self, loaded: Sequence[str]) -> None:
        """The workers reported that these loads are over."""
        self._loading.difference_update(loaded)

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
