"""What came to be in the host tier and what went, in vLLM's own words: for routers that go by KV events."""

from __future__ import annotations

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from aiokv.integrations.vllm.keeping import TierChange
from aiokv.offload.events import BlocksRemoved

__all__ = ["kv_event"]


def kv_event(change: TierChange) -> KVCacheEvent:
    """One event; its medium is host memory."""
    event, lora = change.event, change.lora
    hashes = [maybe_convert_block_hash(block) for block in event.hashes]
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
        token_ids=list(event.tokens or ()),
        block_size=event.block_size,
        lora_id=None if lora is None else lora.adapter_id,
        medium=MEDIUM_CPU,
        lora_name=None if lora is None else lora.name,
    )
