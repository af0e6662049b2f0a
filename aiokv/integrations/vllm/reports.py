"""What came of a worker's orders, gathered until vLLM's thread asks."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from aiokv.integrations.vllm.orders import Blocks, Load, Orders, Recall, Send

__all__ = ["Ended", "Outcome", "Reports", "blocks_of"]


@dataclass(slots=True)
class Outcome:
    """What came to an end since it was last asked for.

    Attributes:
        sent: Requests whose blocks are held no longer.
        loaded: Requests whose load is over, be it well or not.
        failed: Those of them whose load failed, with the blocks that hold nothing.
        loads: For each fetch that went well, the seconds that it took, and its bytes.
        recalls: The same of what came from the host tier.
        unloaded: Fetches that failed.
        missed: Recalls that did not bring all.
        unsent: How many of ``sent`` nobody read to the end.
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, tuple[Blocks, ...]] = field(default_factory=dict)
    loads: list[tuple[float, int]] = field(default_factory=list)
    recalls: list[tuple[float, int]] = field(default_factory=list)
    unloaded: int = 0
    missed: int = 0
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How an order ended.

    Attributes:
        order: Which.
        failed: Its blocks that hold nothing, or that nobody read.
        seconds: That it took.
        size: Bytes that it moved.
    """

    order: Send | Load | Recall
    failed: tuple[Blocks, ...]
    seconds: float = 0.0
    size: int = 0


class Reports:
    """Each request that waits is told once: when all that was ordered for it is over.

    ``add`` is for any thread, the others for vLLM's.
    """

    def __init__(self) -> None:
        #: A deque's ends need no lock.
        self._ended: deque[Ended] = deque()
        #: Orders of each request that waits that are not over.
        self._waits: Counter[str] = Counter()
        #: And the blocks that hold nothing, of those that are.
        self._empty: dict[str, tuple[Blocks, ...]] = {}
        #: Sends of each request that are not over, and requests one of whose sends nobody read to the end.
        self._sends: Counter[str] = Counter()
        self._unread: set[str] = set()
        #: Requests that are over and hold their blocks until their sends are, too.
        self._held: set[str] = set()
        #: Requests whose sends are not to be told, as vLLM took their blocks.
        self._lost: set[str] = set()
        #: Those of both that have to be looked at.
        self._changed: set[str] = set()

    def expect(self, orders: Orders) -> None:
        """These will end."""
        self._waits.update(name for name in orders.waited_for())
        self._sends.update(send.request for send in orders.sends)
        held = [*orders.held, *(send.request for send in orders.sends if send.ends)]
        self._held.update(held)
        self._lost.update(orders.lost)
        self._changed.update(held, orders.lost)

    def add(self, end: Ended) -> None:
        """One has."""
        self._ended.append(end)

    def take(self) -> Outcome | None:
        """What came to an end since the last call; None where nothing did."""
        if not self._ended and not self._changed:
            return None
        found = Outcome()
        while self._ended:
            end = self._ended.popleft()
            if isinstance(end.order, Send):
                self._sent(end, end.order.request)
            else:
                self._loaded(end, end.order, found)
        for name in self._changed:
            self._look(name, found)
        self._changed.clear()
        return found

    def _sent(self, end: Ended, name: str) -> None:
        self._sends[name] -= 1
        if end.failed:
            self._unread.add(name)
        self._changed.add(name)

    def _look(self, name: str, found: Outcome) -> None:
        """Tell of a request that is over, as vLLM knows, once nothing of it is being sent any more."""
        if self._sends[name]:
            return
        del self._sends[name]
        if name in self._lost:
            self._lost.discard(name)
            self._unread.discard(name)
        elif name in self._held:
            self._held.discard(name)
            found.sent.add(name)
            found.unsent += name in self._unread
            self._unread.discard(name)

    def _loaded(self, end: Ended, order: Load | Recall, found: Outcome) -> None:
        name, fetched = order.request, isinstance(order, Load)
        if end.size:
            (found.loads if fetched else found.recalls).append((end.seconds, end.size))
        if end.failed:
            found.unloaded += fetched
            found.missed += not fetched
            self._empty[name] = self._empty.get(name, ()) + end.failed
        self._waits[name] -= 1
        if not self._waits[name]:  # what failed is told once its siblings write nothing any more (vllm#56104)
            del self._waits[name]
            found.loaded.add(name)
            if name in self._empty:
                found.failed[name] = self._empty.pop(name)


def blocks_of(order: Send | Load | Recall) -> tuple[Blocks, ...]:
    """All blocks of an order."""
    return order.blocks
