"""``TransferEngine`` and its transfers, for callers that have no event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic, Self, TypedDict, TypeVar, Unpack

import aiokv
from aiokv.blocking.thread import Future, LoopThread, Shared, iterate
from aiokv.engine.arguments import BlockIds
from aiokv.engine.handle import Handle

__all__ = ["Fetch", "Offer", "TransferEngine"]

H = TypeVar("H", bound=Handle)


class OfferOptions(TypedDict, total=False):
    """What an offer may be told; see ``aiokv.TransferEngine.offer``."""

    tokens: int | None
    readers: int | None
    to: Sequence[str]
    attempt: int
    deadline: float
    hold: float | None
    more: bool
    trace: str


class FetchOptions(TypedDict, total=False):
    """What a fetch may be told; see ``aiokv.TransferEngine.fetch``."""

    sources: Sequence[str] | None
    parts: int | None
    first_token: int
    tokens: int | None
    attempt: int
    deadline: float
    priority: int
    stream: object | None
    trace: str


class Transfer(Generic[H]):
    """What offers and fetches have in common; a context manager, as theirs is an asynchronous one.

    Args:
        engine: Whose.
        handle: The transfer.
    """

    def __init__(self, engine: TransferEngine, handle: H) -> None:
        self._engine = engine
        self._thread = engine.thread
        self._handle = handle

    def __repr__(self) -> str:
        return f"<blocking {self._handle.transfer_id}/{self._handle.attempt}>"

    @property
    def transfer_id(self) -> str:
        """The id that the router or caller issued."""
        return self._handle.transfer_id

    @property
    def attempt(self) -> int:
        """Which attempt at this id it is."""
        return self._handle.attempt

    @property
    def error(self) -> aiokv.AiokvError | None:
        """Why the transfer failed, as far as it has; None while all is well."""
        return self._handle.error

    @property
    def progress(self) -> aiokv.Progress:
        """How far it has got."""
        return self._thread.call(lambda: self._handle.progress)

    def explain(self) -> str:
        """One line for a person: what each part waits for, and for how long it still may."""
        return self._thread.call(self._handle.explain)

    def done(self) -> bool:
        """Whether the transfer is over, and its blocks quiet and given back. Never blocks."""
        return self._handle.done()

    def start(self) -> None:
        """Begin without ``with``; then ``wait`` (or ``cancel`` and ``wait``) ends it.

        Raises:
            LocalProtocolError: It was begun before.
            InvalidBlocks, BusyError, CapacityError, ClosedError: It can't begin; nothing was taken.
        """
        self._thread.call(self._handle.start)

    def cancel(self, reason: str = "cancelled") -> None:
        """Give the transfer up on both sides; ``wait`` tells when it is quiet.

        Raises:
            LocalProtocolError: It was not begun.
        """
        self._thread.call(lambda: self._handle.cancel(reason))

    def wait(self) -> Future[None]:
        """Over when the transfer is, and nothing in flight touches its blocks; raises what it failed with.

        Cancelling it changes nothing for the transfer.
        """
        return self._thread.submit(self._handle.wait)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.run(self._handle.__aexit__(kind, error, traceback))


class Offer(Transfer[aiokv.Offer]):
    """The producer's side of a transfer; made by ``TransferEngine.offer``."""

    def __init__(self, engine: TransferEngine, handle: aiokv.Offer) -> None:
        super().__init__(engine, handle)
        self._announced: set[int] = set()

    @property
    def tokens(self) -> int:
        """Tokens offered."""
        return self._handle.tokens

    def layer_ready(self, layer: int, *, stream: object | None = None) -> None:
        """Say that a layer of all blocks is written; see ``aiokv.Offer.layer_ready``. Never blocks.

        Args:
            layer: Model-wide index of the layer.
            stream: The stream that writes it; by default the calling thread's current stream.
        """
        self._handle.layer_ready(layer, stream=stream)
        self._announced.add(layer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:  # all is written, as of this thread's stream and not as of the loop's
                for layer in set(range(self._engine.cache.layout.layers)) - self._announced:
                    self.layer_ready(layer)
        except BaseException as failure:
            super().__exit__(type(failure), failure, failure.__traceback__)
            raise
        super().__exit__(kind, error, traceback)


class Fetch(Transfer[aiokv.Fetch]):
    """The consumer's side of a transfer; made by ``TransferEngine.fetch``."""

    @property
    def tokens(self) -> int:
        """Tokens that the transfer moves up to; -1 while that isn't known."""
        return self._handle.tokens

    @property
    def more(self) -> bool:
        """Whether the producer said that the rest of it is offered apart."""
        return self._handle.more

    def layer(self, layer: int) -> Future[None]:
        """Over when a layer is in place; see ``aiokv.Fetch.layer``."""
        return self._thread.submit(lambda: self._handle.layer(layer))

    def layer_ordered(self, layer: int) -> Future[None]:
        """Over when a layer's copies are ordered on the stream; see ``aiokv.Fetch.layer_ordered``."""
        return self._thread.submit(lambda: self._handle.layer_ordered(layer))

    def layers(self) -> Iterator[int]:
        """The layers as they land, each once; see ``aiokv.Fetch.layers``."""
        return iterate(self._thread, self._handle.layers())


class TransferEngine(Shared):
    """``aiokv.TransferEngine`` in a thread; a context manager.

    Args:
        engine: The engine, not entered.
        thread: Runs its loop; by default one of its own, which ends with it.

    Attributes:
        engine: As given.
        cache: The engine's.
    """

    def __init__(self, engine: aiokv.TransferEngine, *, thread: LoopThread | None = None) -> None:
        super().__init__(engine, thread)
        self.engine = engine
        self.cache = engine.cache

    @property
    def address(self) -> str:
        """Where peers reach it."""
        return self.engine.address

    def offer(self, tid: str, blocks: BlockIds, **options: Unpack[OfferOptions]) -> Offer:
        """Make an offer; arguments and errors are those of ``aiokv.TransferEngine.offer``."""
        return Offer(self, self.thread.call(lambda: self.engine.offer(tid, blocks, **options)))

    def fetch(self, tid: str, blocks: BlockIds, **options: Unpack[FetchOptions]) -> Fetch:
        """Make a fetch; arguments and errors are those of ``aiokv.TransferEngine.fetch``.

        Without ``stream`` it is the calling thread's current one.
        """
        options["stream"] = self.cache.device.adopt(options.get("stream"))
        return Fetch(self, self.thread.call(lambda: self.engine.fetch(tid, blocks, **options)))

    def renew(self, tid: str, *, sources: Sequence[str] | None = None, attempt: int = 0) -> None:
        """Say that it will be fetched; see ``aiokv.TransferEngine.renew``."""
        self.thread.call(lambda: self.engine.renew(tid, sources=sources, attempt=attempt))

    def wanted(self, tid: str, *, readers: int = 1, attempt: int = 0) -> Future[int]:
        """Over when all readers wait for it; see ``aiokv.TransferEngine.wanted``."""
        return self.thread.submit(lambda: self.engine.wanted(tid, readers=readers, attempt=attempt))

    def statistics(self) -> aiokv.Statistics:
        """Counts so far, and what is going on. Never blocks."""
        return self.engine.statistics()
