"""What a lookup found, held for as long as its context is entered."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiokv.errors import LocalProtocolError
from aiokv.offload.policies import Key

if TYPE_CHECKING:
    from aiokv.offload.tier import HostTier

__all__ = ["Lookup"]


class Lookup:
    """The longest prefix that the tier has; made by ``HostTier.lookup``, and entered once.

    While it is entered nothing of it is evicted, however much is stored. Blocks that are being stored count:
    a load of them goes on as soon as they are there. A reset of the tier makes it worth nothing.

    Attributes:
        tier: Where it is held.
        hashes: What was asked for.
    """

    def __init__(self, tier: HostTier, hashes: Sequence[Key]) -> None:
        self.tier = tier
        self.hashes = hashes
        #: Of the blocks that were found; None while it isn't entered.
        self.places: list[int] | None = None
        #: The tier's, when it was entered: a reset makes it another.
        self.generation = -1
        self._entered = False

    def __repr__(self) -> str:
        state = f"{len(self)} of {len(self.hashes)} blocks" if self.places is not None else "not entered"
        return f"<Lookup: {state}>"

    def __len__(self) -> int:
        """Blocks of the prefix that are held."""
        return len(self.places or ())

    @property
    def tokens(self) -> int:
        """Tokens of these."""
        return len(self) * self.tier.block_size

    async def __aenter__(self) -> Self:
        """Look, and hold what is found.

        Raises:
            ClosedError: The tier isn't open.
            LocalProtocolError: It was entered before.
            ValueError: A hash stands twice.
        """
        if self._entered:
            raise LocalProtocolError("a lookup is entered once; make another")
        self._entered = True
        await self.tier.hold(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.tier.let_go(self)
