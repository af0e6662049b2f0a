"""Names for the content of blocks: each hash covers its block's tokens and all that come before them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import SupportsIndex

from aiokv.proto.fields import index

__all__ = ["block_hashes"]

_SWAP = sys.byteorder == "big"


def block_hashes(
    tokens: Iterable[SupportsIndex],
    block_size: int,
    *,
    salt: str | bytes = b"",
    parent: bytes | None = None,
) -> list[bytes]:
    """A chained sha256 for each whole block of tokens, in their order.

    Equal hashes mean equal tokens up to the end of the block, and the same salt. Tokens after the last
    whole block have none, since that block is not full yet.

    Args:
        tokens: Token ids, each of 64 bits.
        block_size: Tokens per block.
        salt: Keeps those apart who mustn't share blocks (tenants), or guess at what others asked.
        parent: Hash of the block before the first of these; then the salt is in it already.

    Raises:
        TypeError: A token, or the block size, is no integer; the salt or the parent is none.
        ValueError: The block size isn't positive, a token doesn't fit, or a salt comes with a parent.
    """
    size = index(block_size, "block_size")
    if size <= 0:
        raise ValueError(f"block_size is positive, not {block_size}")
    if isinstance(salt, str):
        salt = salt.encode()
    if not isinstance(salt, bytes) or not isinstance(parent, bytes | None):
        raise TypeError(f"salt is str or bytes, and parent bytes, not {salt!r} and {parent!r}")
    if parent is not None and salt:
        raise ValueError("the salt is in the parent already; give it with the first block")
    try:
        ids = array("q", [index(token, "a token id") for token in tokens])
    except OverflowError:
        raise ValueError("a token id has more than 64 bits") from None
    if _SWAP:
        ids.byteswap()
    raw = memoryview(ids).cast("B")
    # The salt has a hash of its own, so that no salt and tokens can be read as another salt and tokens.
    before = sha256(b"aiokv block" + salt).digest() if parent is None else parent
    found = []
    for start in range(0, len(ids) // size * size, size):
        state = sha256(before)
        state.update(raw[8 * start : 8 * (start + size)])
        before = state.digest()
        found.append(before)
    return found
