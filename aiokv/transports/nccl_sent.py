"""What a producer gave to a link: in chunks that fit the staging memory, done when none is read any more."""

from __future__ import annotations

from aiokv.errors import AiokvError, DeviceError

__all__ = ["Sent"]


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
