"""What a producer gave to a link: in chunks that fit the staging memory, done when none is read any more."""

from __future__ import annotations

from collections.abc import Iterator

from aiokv.errors import AiokvError, DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["Sent", "split"]


class Sent:
    """Done when no chunk of what was to be sent is read any more."""

    __slots__ = ("failure", "flying", "left")

    def __init__(self) -> None:
        #: Chunks that are not across, and those of them that are in flight.
        self.left = 0
        self.flying = 0
        self.failure: DeviceError | None = None

    def done(self) -> bool:
        """Whether the memory is read no more."""
        if self.flying:
            return False
        if self.failure is not None:
            raise self.failure
        return not self.left

    def fail(self, why: AiokvError) -> None:
        """Not all of it was sent."""
        if self.failure is None:
            self.failure = DeviceError("not all of the chunk was sent")
            self.failure.__cause__ = why


def split(plan: CopyPlan, chunk: Chunk, limit: int) -> Iterator[Chunk]:
    """A chunk as some that are no longer than ``limit`` bytes.

    Raises:
        DeviceError: One piece of it is longer.
    """
    layer, copy, low, high, _ = chunk
    piece = plan.copies(layer)[copy].section.piece_bytes
    if piece > limit:
        raise DeviceError(f"nccl: pieces of {piece} bytes, and only {limit} are sent as one; raise `staging`")
    step = limit // piece
    for start in range(low, high, step):
        end = min(start + step, high)
        yield Chunk(layer, copy, start, end, (end - start) * piece)
