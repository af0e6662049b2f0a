"""The scheduler's side of what requests leave for others: which blocks are offered, and when.

A request's KV is offered once it is over. Where that is wanted (``layerwise``), it is offered in the step
that computes the last of its prompt, so that layers are sent while those behind them are computed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from aiokv.integrations.vllm.orders import Blocks, Orders, Refusal, Send, Ticket, listed
from aiokv.integrations.vllm.params import answer, minted, readers

__all__ = ["BlockIds", "Leaving", "Request"]

_log = logging.getLogger("aiokv")

BlockIds = Sequence[Sequence[int]]
#: Whether blocks are held, and what the client is answered.
Left = tuple[bool, dict[str, object] | None]


class Request(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    num_computed_tokens: int
    kv_transfer_params: dict[str, object] | None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""


class Leaving:
    """Decides for all requests of one instance. It does no I/O.

    Args:
        block_sizes: Tokens per block, for each KV cache group.
        engine: Name of this instance.
        mint: Makes transfer ids, where no router did.
        layerwise: Offer in the step that computes the last of a prompt. With several KV cache groups that
            is done afterwards all the same, since vLLM gives up blocks of theirs meanwhile.
        hold: Seconds for which the workers hold what nobody says he wants; the decode side is told.

    Attributes:
        layerwise: Whether it is done.
        addresses: Addresses of this instance's ranks, in their order; empty until the workers are up.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        engine: str,
        mint: Callable[[], str] = lambda: uuid.uuid4().hex,
        *,
        layerwise: bool = False,
        hold: float = 30.0,
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._engine = engine
        self._mint = mint
        self._hold = hold
        self.layerwise = layerwise and len(self._block_sizes) == 1
        self.addresses: tuple[str, ...] = ()
        #: Requests whose prompt is being computed, with their blocks so far.
        self._growing: dict[str, tuple[Request, list[int]]] = {}
        #: Those that are being sent and aren't over.
        self._early: dict[str, Ticket] = {}
        #: Those whose blocks were taken away meanwhile: nothing more is left of them.
        self._lost: set[str] = set()

    def begun(self, request: Request, blocks: BlockIds) -> None:
        """A request has blocks: all of them, from its first token on."""
        name, params = request.request_id, request.kv_transfer_params or {}
        wanted = self.layerwise and params.get("do_remote_decode")
        if wanted and name not in self._early and name not in self._lost:
            self._growing[name] = (request, list(blocks[0]))

    def scheduled(self, name: str, tokens: int, new: Sequence[int], orders: Orders) -> None:
        """A request computes tokens in the step that is being put together; see ``Keeping.scheduled``."""
        if name not in self._growing:
            return
        request, blocks = self._growing[name]
        blocks.extend(new)
        if request.num_computed_tokens + tokens < request.num_prompt_tokens:
            return
        del self._growing[name]
        found = self._named(request)
        if found is None:
            return
        ticket, to = found[0] or Ticket(self._mint()), found[1]
        self._early[name] = ticket
        held = self._listed([blocks], request.num_prompt_tokens)
        orders.sends.append(Send(name, ticket, held, request.num_prompt_tokens, to, early=True))

    def preempted(self, names: Iterable[str], orders: Orders) -> None:
        """The blocks of these requests were taken away: they are to be quiet before they are written."""
        for name in names:
            self._growing.pop(name, None)
            if self._early.pop(name, None) is not None:
                self._lost.add(name)
                orders.lost.append(name)

    def finished(self, request: Request, blocks: BlockIds, orders: Orders, *, complete: bool) -> Left:
        """A request is over; see ``SchedulerHalf.finished``."""
        name, params = request.request_id, request.kv_transfer_params or {}
        self._growing.pop(name, None)
        if name in self._lost or not params.get("do_remote_decode"):
            self._lost.discard(name)
            return False, None
        early = self._early.pop(name, None)
        if early is None:
            return self._leave(request, blocks, orders, complete=complete)
        orders.held.append(name)
        if complete:
            return True, answer(early, self.addresses, request.num_prompt_tokens, self._engine, self._hold)
        orders.aborts.append(name)
        return True, None

    def _leave(self, request: Request, blocks: BlockIds, orders: Orders, *, complete: bool) -> Left:
        found = self._named(request)
        if found is None:
            return False, None
        ticket, to = found
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        held = self._listed(blocks, tokens)
        if not complete or tokens < request.num_prompt_tokens or not any(group.ids for group in held):
            if ticket is not None:
                orders.refusals.append(Refusal(ticket, to))
            return False, None
        ticket = ticket or Ticket(self._mint())
        orders.sends.append(Send(request.request_id, ticket, held, tokens, to))
        return True, answer(ticket, self.addresses, tokens, self._engine, self._hold)

    def _named(self, request: Request) -> tuple[Ticket | None, tuple[str, ...]] | None:
        """The transfer that a router named, and whom to; None where that can't be meant."""
        params = request.kv_transfer_params or {}
        try:
            return minted(params), readers(params)
        except (TypeError, ValueError) as error:
            _log.warning("request %s leaves nothing for others: %s", request.request_id, error)
            return None

    def _listed(self, blocks: BlockIds, end: int) -> tuple[Blocks, ...]:
        pairs = zip(blocks, self._block_sizes, strict=True)
        return tuple(listed(ids, size, 0, end) for ids, size in pairs)
