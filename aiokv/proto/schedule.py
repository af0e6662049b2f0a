"""Which chunk goes next: priority first, then fair between peers, then between parts.

Pure bookkeeping. A *flow* is what chunks share a path with (one link): flows of equal priority
take turns, and within a flow its parts do, so that neither a peer with many requests nor a long
request starves the others. Chunks come from iterators and are made when their turn comes, so a
thousand queued layers cost a thousand iterators and not a million chunks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from aiokv.proto.plan import Chunk

__all__ = ["ChunkScheduler"]

F = TypeVar("F", bound=Hashable)
P = TypeVar("P", bound=Hashable)


class ChunkScheduler(Generic[F, P]):
    """Queues of chunks, and how much of what was taken is still in flight.

    Args:
        window: Bytes that may be in flight before ``take`` gives nothing.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._queues: dict[int, OrderedDict[F, OrderedDict[P, deque[Iterator[Chunk]]]]] = {}
        self._where: dict[P, tuple[int, F]] = {}
        self._blocked: set[F] = set()
        #: Bytes taken and not yet finished.
        self.in_flight = 0

    def __bool__(self) -> bool:
        """Whether any chunk waits, on a blocked flow too."""
        return bool(self._where)

    def __len__(self) -> int:
        """Parts with chunks that wait."""
        return len(self._where)

    def add(self, flow: F, part: P, chunks: Iterable[Chunk], priority: int = 0) -> None:
        """Queue chunks behind what the part has queued already."""
        priority, flow = self._where.setdefault(part, (priority, flow))
        flows = self._queues.setdefault(priority, OrderedDict())
        flows.setdefault(flow, OrderedDict()).setdefault(part, deque()).append(iter(chunks))

    def put_back(self, flow: F, part: P, chunk: Chunk, priority: int = 0) -> None:
        """Queue a taken chunk again, before what the part has queued."""
        priority, flow = self._where.setdefault(part, (priority, flow))
        flows = self._queues.setdefault(priority, OrderedDict())
        flows.setdefault(flow, OrderedDict()).setdefault(part, deque()).appendleft(iter((chunk,)))

    def take(self) -> tuple[P, Chunk] | None:
        """The chunk whose turn it is; None if nothing may go now. Its bytes count as in flight."""
        if self.in_flight >= self._window:
            return None
        for priority in sorted(self._queues, reverse=True):
            flows = self._queues[priority]
            for flow in list(flows):
                if flow in self._blocked:
                    continue
                found = self._take_from(priority, flow)
                if found is not None:
                    self.in_flight += found[1].nbytes
                    return found
        return None

    def _take_from(self, priority: int, flow: F) -> tuple[P, Chunk] | None:
        flows = self._queues[priority]
        parts = flows[flow]
        while parts:
            part, queue = next(iter(parts.items()))
            chunk = next(chain.from_iterable(_drain(queue)), None)
            if chunk is None:
                self.drop(part)
                continue
            parts.move_to_end(part)
            flows.move_to_end(flow)
            return part, chunk
        return None

    def finished(self, nbytes: int) -> None:
        """A taken chunk is no longer in flight."""
        self.in_flight -= nbytes

    def drop(self, part: P) -> None:
        """Forget what a part has queued; what it has in flight stays counted."""
        if part not in self._where:
            return
        priority, flow = self._where.pop(part)
        flows = self._queues[priority]
        del flows[flow][part]
        if not flows[flow]:
            del flows[flow]
        if not flows:
            del self._queues[priority]

    def block(self, flow: F) -> None:
        """Take nothing from this flow until it is unblocked."""
        self._blocked.add(flow)

    def unblock(self, flow: F) -> None:
        """The flow may be taken from again."""
        self._blocked.discard(flow)


def _drain(queue: deque[Iterator[Chunk]]) -> Iterator[Iterator[Chunk]]:
    """The iterators of a queue, each dropped once it is used up."""
    while queue:
        yield queue[0]
        queue.popleft()
