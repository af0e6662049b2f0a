"""Which instances a request goes to. ``Selection`` is the contract; ``LeastLoaded`` is what is used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from aiokv.router.registry import Group, Member

__all__ = ["LeastLoaded", "Selection"]


class Selection(Protocol):
    """Chooses a prefill and a decode instance for a request."""

    def choose(self, groups: Sequence[Group], prompt: bytes) -> tuple[Member, Member]:
        """The pair, both of one group. Called on the loop, so it must be quick.

        Args:
            groups: At least one; each has instances of both roles, all of which may be chosen.
            prompt: The prompt or the messages, as JSON.
        """


class LeastLoaded:
    """The least loaded instances, but the same prefill instance for prompts that begin alike.

    A prefill instance that has seen a prompt's beginning may have its KV still. Prompts that have their
    leading blocks in common go to the same one, by consistent hashing: each instance has a rank for each
    beginning, so that one that comes or goes moves only what is its own. One that has more than its share to
    do is passed over (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2016).

    Args:
        block: Bytes of JSON in a block.
        blocks: How many leading blocks count. A prompt of less than a block has no affinity.
        slack: Times the mean load that an instance may have and still be chosen for its affinity.
    """

    def __init__(self, *, block: int = 256, blocks: int = 2, slack: float = 1.25) -> None:
        if block < 1 or blocks < 1 or not slack >= 1:
            raise ValueError(f"block={block}, blocks={blocks}, slack={slack}: each is at least 1")
        self._block, self._blocks, self._slack = block, blocks, slack

    def choose(self, groups: Sequence[Group], prompt: bytes) -> tuple[Member, Member]:
        """See ``Selection.choose``."""
        group = min(groups, key=_crowding)
        whole = min(len(prompt) // self._block, self._blocks)
        decode = min(group.decodes, key=_load)
        if not whole:
            return min(group.prefills, key=_load), decode
        return self._affine(group.prefills, prompt[: whole * self._block]), decode

    def _affine(self, among: Sequence[Member], beginning: bytes) -> Member:
        share = self._slack * (sum(each.busy for each in among) + 1) / len(among)
        key = hashlib.blake2b(beginning, digest_size=16).digest()
        free = [each for each in among if each.busy < share]
        return max(free or among, key=lambda each: _rank(key, each))


def _rank(key: bytes, member: Member) -> bytes:
    return hashlib.blake2b(member.http.encode(), key=key, digest_size=8).digest()


def _load(member: Member) -> tuple[int, int]:
    # Among the equally loaded the one that was given least, or else one of them got all while little goes on.
    return member.busy, member.served


def _crowding(group: Group) -> float:
    members = [*group.prefills, *group.decodes]
    return sum(each.busy for each in members) / len(members)
