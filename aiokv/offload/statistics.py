"""What a host tier did so far, as one frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Dropped", "TierCounts", "TierStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What ``HostTier.reset`` found.

    Attributes:
        blocks: Blocks that could be found and can't any more, those that were being stored included.
        stores: Stores that were going on, and were given up.
        loads: Loads that were going on; to their callers they are misses.
        pinned: Blocks whose places come back when a lookup is left.
        drained: Whether all copies were over when it returned; else they keep their blocks until they are.
    """

    blocks: int
    stores: int
    loads: int
    pinned: int
    drained: bool


@dataclass(slots=True)
class TierCounts:
    """What a tier counts as it goes."""

    lookups: int = 0
    hit_blocks: int = 0
    miss_blocks: int = 0
    joined_blocks: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    dropped_blocks: int = 0
    failed_copies: int = 0
    policy_faults: int = 0
    load_ns: int = 0
    store_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """Counts since the tier was entered, and what is going on now. A block is one of every group.

    Attributes:
        lookups: Lookups that were entered.
        hit_blocks: Blocks that they found.
        miss_blocks: Blocks that they asked for and didn't find.
        joined_blocks: Blocks of loads and stores for which another call's copy was on its way already.
        loaded_blocks: Blocks that were copied to the cache.
        stored_blocks: Blocks that were copied to the pool.
        bytes_loaded: Bytes of the former.
        bytes_stored: Bytes of the latter.
        load_seconds: Time of loads, from when they could begin to their events, in sum over their parts.
        store_seconds: The same of stores.
        load_rate: Bytes a second of late, while any were on their way; 0 while nothing is known.
        store_rate: The same of stores.
        evicted_blocks: Blocks that went for others.
        refused_blocks: Blocks that were offered and not kept: not admitted, or no room.
        dropped_blocks: Blocks whose copy failed, or that had changed.
        failed_copies: Parts of copies that failed.
        policy_faults: Times that the policy, or the admission filter, failed and was replaced.
        checksums_checked: Loaded blocks that were looked at.
        checksum_failures: Those that had changed since they were stored.
        canary: Whether none of those had: False says that something writes into this host's memory.
        loads_queued: Parts of loads that wait to be submitted.
        stores_queued: Parts of stores that do.
        copies: Loads and stores going on.
        blocks_leased: Blocks of the cache that these hold, over all groups.
        places: Places of the pool, so far.
        places_wanted: Places that it is to have.
        places_used: Places with a block in them, or being written; of a pool that is shared, as last heard.
        places_pinned: Places that a lookup or a copy of this tier holds.
        places_pending: Places that this tier writes.
        pool_bytes: Bytes of memory that the pool has taken.
        bytes_by_plain: Bytes that the cache's device has moved by one DMA for each fragment: of all that is
            copied there, transfers of engines included. 0 on the host, whose copies go one way.
        bytes_by_batch: The same by one call for many DMA.
        bytes_by_staged: The same gathered on the GPU first.
        bytes_by_kernel: The same by a kernel, within the GPU's memory, too.
        attached: False while the owner of a pool that is shared is lost: nothing is found then, or kept.
    """

    lookups: int
    hit_blocks: int
    miss_blocks: int
    joined_blocks: int
    loaded_blocks: int
    stored_blocks: int
    bytes_loaded: int
    bytes_stored: int
    load_seconds: float
    store_seconds: float
    load_rate: float
    store_rate: float
    evicted_blocks: int
    refused_blocks: int
    dropped_blocks: int
    failed_copies: int
    policy_faults: int
    checksums_checked: int
    checksum_failures: int
    canary: bool
    loads_queued: int
    stores_queued: int
    copies: int
    blocks_leased: int
    places: int
    places_wanted: int
    places_used: int
    places_pinned: int
    places_pending: int
    pool_bytes: int
    bytes_by_plain: int
    bytes_by_batch: int
    bytes_by_staged: int
    bytes_by_kernel: int
    attached: bool
