"""The scheduler's side of what requests leave for others: which blocks are offered, and when.

A request's KV is offered once it is over. Where that is wanted (``layerwise``), it is offered in the step
that computes the last of its prompt, so that layers are sent while those behind them are computed. And where
the decode side waits already, chunks of a prompt are offered before its last is computed: each is a transfer
of its own, so that it begins, fails and ends as any other. The scheduler's side decides how far a chunk goes,
so that all ranks offer the same, and offers it once all ranks say that it is waited for, so that nothing is
offered in vain: who comes late finds it in one.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiokv.integrations.vllm.news import Wanted
from aiokv.integrations.vllm.orders import Blocks, Orders, Refusal, Send, Ticket, Watch, listed
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


@dataclass(slots=True, eq=False)
class _Growing:
    """A request whose prompt is being computed.

    Attributes:
        request: vLLM's.
        ticket: What a router named it; None: nobody can wait for it yet.
        to: Addresses of those who are to have it; empty: whoever asks.
        blocks: Its blocks so far, from its first token on.
        number: Of the chunk that comes next.
        sent: Tokens in the chunks before it.
        watched: The workers were told to watch for it.
        ranks: Those of them at which it is waited for.
        first: The first token that the decode side lacks.
    """

    request: Request
    ticket: Ticket | None
    to: tuple[str, ...]
    blocks: list[int] = field(default_factory=list)
    number: int = 0
    sent: int = 0
    watched: bool = False
    ranks: set[int] = field(default_factory=set)
    first: int = 0


class Leaving:
    """Decides for all requests of one instance. It does no I/O.

    With several KV cache groups everything is offered afterwards, whatever was asked for, since vLLM gives
    up blocks of theirs meanwhile.

    Args:
        block_sizes: Tokens per block, for each KV cache group.
        engine: Name of this instance.
        mint: Makes transfer ids, where no router did.
        layerwise: Offer in the step that computes the last of a prompt, or of a chunk.
        chunks: Offer chunks of prompts that are waited for.
        ranks: How many workers there are.
        hold: Seconds for which the workers hold what nobody says he wants; the decode side is told.

    Attributes:
        addresses: Addresses of this instance's ranks, in their order; empty until the workers are up.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        engine: str,
        mint: Callable[[], str] = lambda: uuid.uuid4().hex,
        *,
        layerwise: bool = False,
        chunks: bool = False,
        ranks: int = 1,
        hold: float = 30.0,
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._engine = engine
        self._mint = mint
        self._hold = hold
        self._layerwise = layerwise and len(self._block_sizes) == 1
        self._chunks = chunks and len(self._block_sizes) == 1
        self._ranks = ranks
        self.addresses: tuple[str, ...] = ()
        self._growing: dict[str, _Growing] = {}
        #: Those whose last is being sent and which aren't over.
        self._early: dict[str, Ticket] = {}
        #: Those whose blocks were taken away while they were sent: nothing more is left of them.
        self._lost: set[str] = set()

    @property
    def follows(self) -> bool:
        """Whether it needs to know what is scheduled in the next step, and what is preempted."""
        return bool(self._growing or self._early)

    def begun(self, request: Request, blocks: BlockIds) -> None:
        """A request has blocks: all of them, from its first token on."""
        name, params = request.request_id, request.kv_transfer_params or {}
        wanted = (self._layerwise or self._chunks) and params.get("do_remote_decode")
        if not wanted or name in self._early or name in self._lost:
            return
        growing = self._growing.get(name)
        if growing is None:
            found = self._named(request)
            if found is None or not (self._layerwise or found[0]):
                return
            growing = self._growing[name] = _Growing(request, *found)
        growing.blocks = list(blocks[0])

    def scheduled(self, name: str, tokens: int, new: Sequence[int], orders: Orders) -> None:
        """A request computes tokens in the step that is being put together; see ``Keeping.scheduled``."""
        growing = self._growing.get(name)
        if growing is None:
            return
        growing.blocks.extend(new)
        request = growing.request
        there, prompt = request.num_computed_tokens + tokens, request.num_prompt_tokens
        if there < prompt:
            self._chunk(name, growing, there if self._layerwise else request.num_computed_tokens, orders)
        elif self._layerwise:
            del self._growing[name]
            ticket = self._early[name] = growing.ticket or Ticket(self._mint())
            held = self._listed([growing.blocks], growing.sent, prompt)
            chunk = ticket.chunk(growing.number)
            orders.sends.append(Send(name, chunk, held, prompt, growing.to, early=True))

    def _chunk(self, name: str, growing: _Growing, there: int, orders: Orders) -> None:
        """Offer what is computed so far if somebody waits for it, which is to be told if not."""
        ticket, (size,) = growing.ticket, self._block_sizes
        if not self._chunks or ticket is None or growing.to or not ticket.divisible:
            return
        end = there // size * size
        if len(growing.ranks) == self._ranks and end > max(growing.sent, growing.first):
            held = self._listed([growing.blocks], growing.sent, end)
            chunk = ticket.chunk(growing.number)
            orders.sends.append(Send(name, chunk, held, end, early=self._layerwise, last=False))
            growing.number, growing.sent = growing.number + 1, end
            growing.watched, growing.ranks, growing.first = False, set(), 0
        if not growing.watched:
            growing.watched = True
            orders.watches.append(Watch(name, ticket.chunk(growing.number), growing.number))

    def wanted(self, rank: int, news: Wanted) -> None:
        """A worker said that a chunk is waited for."""
        growing = self._growing.get(news.request)
        if growing is not None and growing.number == news.number:
            growing.first = min(growing.first, news.first) if growing.ranks else news.first
            growing.ranks.add(rank)

    def preempted(self, names: Iterable[str], orders: Orders) -> None:
        """The blocks of these requests were taken away: they are to be quiet before they are written."""
        for name in names:
            growing = self._growing.get(name)
            if growing is not None and (not growing.number or len(growing.ranks) == self._ranks):
                continue  # who waits for the next chunk has those before it: it goes on from there
            if growing is not None and growing.ticket is not None:
                del self._growing[name]
                orders.refusals.append(Refusal(growing.ticket.chunk(growing.number)))
            elif self._early.pop(name, None) is None:
                continue
            self._lost.add(name)
            orders.lost.append(name)

    def finished(self, request: Request, blocks: BlockIds, orders: Orders, *, complete: bool) -> Left:
        """A request is over; see ``SchedulerHalf.finished``."""
        name, params = request.request_id, request.kv_transfer_params or {}
        growing, early = self._growing.pop(name, None), self._early.pop(name, None)
        if name in self._lost or not params.get("do_remote_decode"):
            self._lost.discard(name)
            return False, None
        if early is not None:
            orders.held.append(name)
            if complete:
                return True, self._answer(early, request.num_prompt_tokens)
            orders.aborts.append(name)
            return True, None
        return self._leave(request, blocks, growing, orders, complete=complete)

    def _leave(
        self, request: Request, blocks: BlockIds, growing: _Growing | None, orders: Orders, *, complete: bool
    ) -> Left:
        found = self._named(request)
        if found is None:
            return False, None
        ticket, to = found
        number, sent = (growing.number, growing.sent) if growing is not None else (0, 0)
        name, tokens = request.request_id, min(request.num_computed_tokens, request.num_prompt_tokens)
        held = self._listed(blocks, sent, tokens)
        if not complete or tokens < request.num_prompt_tokens or not any(group.ids for group in held):
            if ticket is not None:
                orders.refusals.append(Refusal(ticket.chunk(number), to))
            if number:  # others may be reading what was sent so far
                orders.held.append(name)
                orders.aborts.append(name)
            return number > 0, None
        ticket = ticket or Ticket(self._mint())
        orders.sends.append(Send(name, ticket.chunk(number), held, tokens, to))
        return True, self._answer(ticket, tokens)

    def _answer(self, ticket: Ticket, tokens: int) -> dict[str, object]:
        return answer(ticket, self.addresses, tokens, self._engine, self._hold)

    def _named(self, request: Request) -> tuple[Ticket | None, tuple[str, ...]] | None:
        """The transfer that a router named, and whom to; None where that can't be meant."""
        params = request.kv_transfer_params or {}
        try:
            return minted(params), readers(params)
        except (TypeError, ValueError) as error:
            _log.warning("request %s leaves nothing for others: %s", request.request_id, error)
            return None

    def _listed(self, blocks: BlockIds, first: int, end: int) -> tuple[Blocks, ...]:
        pairs = zip(blocks, self._block_sizes, strict=True)
        return tuple(listed(ids, size, first, end) for ids, size in pairs)
