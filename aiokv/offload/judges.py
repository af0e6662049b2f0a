"""The policy and the admission filter of a tier: anybody's, and they may fail, which costs hits only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiokv.offload.policies import Admission, Key, Lru, Policy

__all__ = ["Judges"]


class Judges:
    """Asks and tells them; one that raises is replaced, the policy by ``Lru`` and the filter by none.

    Args:
        policy: Orders what may go.
        admission: Says which new blocks get a place; None: all.
        there: Gives the place and key of every block, and whether it may go.
        distrusted: Told of one that failed.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission | None,
        *,
        there: Callable[[], Sequence[tuple[int, Key, bool]]],
        distrusted: Callable[[Exception], None] | None,
    ) -> None:
        self.policy = policy
        self._admission = admission
        self._there = there
        self._on_distrusted = distrusted

    def stored(self, places: Sequence[int], keys: Sequence[Key]) -> None:
        """See ``Policy``."""
        try:
            self.policy.stored(places, keys)
        except Exception as error:  # noqa: BLE001 - see above
            self.distrust(error)

    def used(self, places: Sequence[int], *, hit: bool) -> None:
        """See ``Policy``."""
        try:
            self.policy.used(places, hit=hit)
        except Exception as error:  # noqa: BLE001 - see above
            self.distrust(error)

    def idle(self, places: Sequence[int]) -> None:
        """See ``Policy``."""
        try:
            self.policy.idle(places)
        except Exception as error:  # noqa: BLE001 - see above
            self.distrust(error)

    def removed(self, places: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """See ``Policy``."""
        try:
            self.policy.removed(places, keys, evicted=evicted)
        except Exception as error:  # noqa: BLE001 - see above
            self.distrust(error)

    def admitted(self, keys: Sequence[Key]) -> int:
        """See ``Admission``."""
        if self._admission is None or not keys:
            return len(keys)
        try:
            return max(0, min(int(self._admission.admit(keys)), len(keys)))
        except Exception as error:  # noqa: BLE001 - see above
            self._admission = None
            if self._on_distrusted is not None:
                self._on_distrusted(error)
            return len(keys)

    def distrust(self, error: Exception) -> None:
        """Go on with a policy that is known to work, and all that may go."""
        self.policy = policy = Lru()
        there = self._there()
        policy.stored([place for place, _, _ in there], [key for _, key, _ in there])
        policy.idle([place for place, _, idle in there if idle])
        if self._on_distrusted is not None:
            self._on_distrusted(error)
