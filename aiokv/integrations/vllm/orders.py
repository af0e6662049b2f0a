"""What the scheduler's half of the connector has the worker's half do, in one step of vLLM.

vLLM carries these from one process to others, so they are plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "NULL",
    "Blocks",
    "Keep",
    "Load",
    "Orders",
    "Queued",
    "Recall",
    "Refusal",
    "Release",
    "Send",
    "Ticket",
    "Watch",
    "behind",
    "listed",
]

#: Characters of a transfer id that can still be made longer: an engine takes 256.
_MOST_ID = 240

#: The block that vLLM lists where a group needs none any more: those before a sliding window.
NULL = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block ids of one KV cache group.

    Attributes:
        start: Index of the first listed block's first token; a multiple of the block size.
        ids: Block ids, in the order of the tokens.
    """

    start: int
    ids: tuple[int, ...]


def listed(ids: Sequence[int], block_size: int, first: int, last: int) -> Blocks:
    """The blocks that hold the tokens from ``first`` up to ``last``, without those that vLLM gave up.

    Args:
        ids: All blocks of a request in one group, from its first token on.
        block_size: Tokens per block.
        first: First token that matters.
        last: One behind the last.
    """
    end = min(len(ids), -(-last // block_size))
    begin = min(end, first // block_size)
    while begin < end and ids[begin] == NULL:
        begin += 1
    return Blocks(begin * block_size, tuple(ids[begin:end]))


def behind(blocks: Blocks, block_size: int, token: int) -> Blocks:
    """Those of some blocks that hold ``token`` and what follows.

    Args:
        blocks: The blocks.
        block_size: Tokens per block.
        token: Index of a token.
    """
    skipped = min(len(blocks.ids), max(0, token - blocks.start) // block_size)
    return Blocks(blocks.start + skipped * block_size, blocks.ids[skipped:])


@dataclass(frozen=True, slots=True)
class Ticket:
    """What both sides call a transfer.

    Attributes:
        transfer: Transfer id.
        attempt: Number of the attempt at it; each is a transfer of its own.
        deadline: Seconds that it may take, where whoever minted the id said so.
    """

    transfer: str
    attempt: int = 0
    deadline: float | None = None

    @property
    def divisible(self) -> bool:
        """Whether its id can be made longer."""
        return len(self.transfer) <= _MOST_ID

    def chunk(self, number: int) -> Ticket:
        """What both sides call a chunk of it: the first as the whole, those behind it by their numbers."""
        if not number:
            return self
        return Ticket(f"{self.transfer}#{number}", self.attempt, self.deadline)


@dataclass(frozen=True, slots=True)
class Send:
    """Offer what a request left in its blocks, or a chunk of that; they are held until all of it is over.

    Attributes:
        request: vLLM's name of the request, for the report.
        ticket: Names the transfer.
        blocks: A list for each KV cache group.
        tokens: Tokens that are there, those of chunks before included.
        to: Addresses of those who are to have it; empty: whoever asks.
        early: This step computes the last of it, layer by layer, and the request is not over yet.
        last: Nothing follows. What is early, or isn't the last, may be over before its request is, and is
            not reported before ``Orders.held`` names the request, or its last is ordered.
    """

    request: str
    ticket: Ticket
    blocks: tuple[Blocks, ...]
    tokens: int
    to: tuple[str, ...] = ()
    early: bool = False
    last: bool = True

    @property
    def ends(self) -> bool:
        """Whether its request is over: it is the last, and was not begun before that."""
        return self.last and not self.early


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch into the blocks of a request that waits for it.

    Attributes:
        request: vLLM's name of the request, for the report.
        ticket: Names the transfer.
        sources: Addresses of the prefill side's ranks; empty: they name this side.
        blocks: A list for each KV cache group.
        first: First token that is neither here yet, nor recalled from the host tier.
        tokens: Tokens that are to be here in the end.
        parts: How many name this side, where there are no sources.
        chunked: It may come in chunks, since the prefill side may have begun when this side asks.
    """

    request: str
    ticket: Ticket
    sources: tuple[str, ...]
    blocks: tuple[Blocks, ...]
    first: int
    tokens: int
    parts: int = 1
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Queued:
    """Have the prefill side hold what a request is to fetch that waits for blocks, until it gets them.

    It ends with the ``Load`` or the ``Release`` of the same ticket, one of which follows.

    Attributes:
        ticket: Names the transfer.
        sources: Addresses of the prefill side's ranks; empty: they name this side.
        hold: Seconds for which the prefill side holds it for who says nothing; None: it didn't say.
    """

    ticket: Ticket
    sources: tuple[str, ...]
    hold: float | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the prefill side that nobody will fetch this, so that it holds the blocks no longer.

    Attributes:
        ticket: Names the transfer.
        sources: Addresses of the prefill side's ranks; empty: they name this side.
        parts: How many do, in that case.
    """

    ticket: Ticket
    sources: tuple[str, ...]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell when the decode side waits for a chunk, which is then worth offering (``Wanted``).

    It ends with the ``Send`` or the ``Refusal`` of the same ticket, one of which follows.

    Attributes:
        request: vLLM's name of the request.
        ticket: Names the transfer.
        number: The chunk's.
    """

    request: str
    ticket: Ticket
    number: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Tell whoever asks for this, or waits for it, that it will never be offered.

    Attributes:
        ticket: Names the transfer.
        to: Addresses of those who were to have it; empty: whoever asks.
    """

    ticket: Ticket
    to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recall:
    """Bring blocks back from the host tier, for a request that waits for them.

    Attributes:
        request: vLLM's name of the request, for the report.
        hashes: vLLM's hashes of blocks of the tier, which continue each other.
        first: First token of them.
        blocks: Where they go, a list for each KV cache group. That of one with a sliding window may begin
            later, where vLLM needs no more.
    """

    request: str
    hashes: tuple[bytes, ...]
    first: int
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy blocks to the host tier that this step, or one before, has filled.

    vLLM doesn't hold them for that: it may give them to others, whose step has this in its ``fences``.

    Attributes:
        number: For the report, and for fences.
        hashes: vLLM's hashes of blocks of the tier, which continue each other.
        blocks: Block ids, a list for each KV cache group.
        parent: Hash of the block before the first; None if there is none.
    """

    number: int
    hashes: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]
    parent: bytes | None


@dataclass(slots=True)
class Orders:
    """All of one step.

    Attributes:
        reset: Empty the host tier, before anything else of this step; the number of that reset, or None.
        fences: Numbers of ``Keep``s that read blocks which this step writes: they are to be over before.
        recalls: What to bring back from the host tier.
        keeps: What to copy there, once the step has computed.
        watches: What to tell of, once it is waited for.
        sends: What to offer.
        queued: What will be fetched later.
        loads: What to fetch.
        releases: Whom to tell that nothing will be fetched.
        refusals: What will never be offered.
        aborts: Requests, by vLLM's names, whose loads nobody waits for any more, or whose sends so far.
        lost: Requests whose blocks were taken away while they are sent: that is to be over before the step.
        held: Requests that are over, and whose blocks are held until what is being sent of them is, too.
    """

    reset: int | None = None
    fences: set[int] = field(default_factory=set)
    recalls: list[Recall] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    queued: list[Queued] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    def waited_for(self) -> list[str]:
        """Requests that wait, once for each order."""
        return [load.request for load in self.loads] + [recall.request for recall in self.recalls]

    def __bool__(self) -> bool:
        """Whether a step is needed for it."""
        moves = self.sends or self.loads or self.recalls or self.keeps
        told = self.queued or self.watches or self.releases or self.refusals
        over = self.aborts or self.lost or self.held
        return bool(moves or told or over or self.reset is not None)
