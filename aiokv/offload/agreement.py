"""What all ranks of a group have of a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from aiokv.errors import AiokvError
from aiokv.offload.policies import Key
from aiokv.ranks import Blocks, Hit, Miss, Outcome, RankGroup

__all__ = ["agreed_on"]


async def agreed_on(ranks: RankGroup, hashes: Sequence[Key], found: int) -> int:
    """How many blocks of a prefix every rank has.

    Args:
        ranks: The group.
        hashes: What is looked up, the same on all ranks: each checks that by a digest.
        found: How many this rank has.

    Raises:
        AiokvError: As of ``RankGroup.agree``; a rank that failed, too.
    """
    digest = sha256()
    for key in hashes:
        digest.update(key if isinstance(key, bytes) else repr(key).encode())
        digest.update(b";")
    ours: Outcome = Hit(Blocks(found)) if found else Miss()
    match (await ranks.agree([ours], keys=[digest.digest()]))[0]:
        case Hit(held=Blocks(count=count)):
            return min(count, found)
        case Miss():
            return 0
        case other:
            raise AiokvError(f"the ranks of the group came to {other}")
