"""Which new blocks are worth a place: a filter before the policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiokv.offload.policies.base import Key
from aiokv.proto.fields import index

__all__ = ["Admission", "SecondSight"]


@runtime_checkable
class Admission(Protocol):
    """Says how much of what is new is to be kept."""

    def admit(self, keys: Sequence[Key]) -> int:
        """How many of these keys, from the first on, get a place.

        Args:
            keys: New ones, in the order of their tokens. Behind one that is left out, the others could
                not be found as a prefix.
        """


class SecondSight:
    """Keeps a block when it is offered for the second time: most prompts never come again.

    Args:
        remembered: Keys that are remembered at most; those that came longest ago are forgotten.

    Raises:
        TypeError: It is no integer.
        ValueError: It isn't positive.
    """

    def __init__(self, remembered: int = 65_536) -> None:
        self._most = index(remembered, "remembered")
        if self._most <= 0:
            raise ValueError(f"remembered is positive, not {remembered}")
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._seen)

    def admit(self, keys: Sequence[Key]) -> int:
        """See ``Admission``."""
        seen, admitted = self._seen, 0
        for key in keys:
            if key not in seen:
                break
            del seen[key]
            admitted += 1
        for key in keys[admitted:]:
            seen[key] = None
        while len(seen) > self._most:
            seen.popitem(last=False)
        return admitted
