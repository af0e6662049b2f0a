"""Takes a tier's statistics from where they are kept."""

from __future__ import annotations

from aiokv.device.submission import Submissions
from aiokv.engine.leases import BlockLeases
from aiokv.offload.checksums import Checksums
from aiokv.offload.copies import Copies
from aiokv.offload.index import Index
from aiokv.offload.segments import Segments
from aiokv.offload.statistics import TierCounts, TierStatistics

__all__ = ["snapshot"]


def snapshot(
    counts: TierCounts,
    table: Index,
    copies: Copies,
    checksums: Checksums,
    submissions: Submissions,
    leases: BlockLeases,
    pool: Segments,
) -> TierStatistics:
    """What a tier did so far, and what is going on."""
    size = pool.place_bytes
    return TierStatistics(
        lookups=counts.lookups,
        hit_blocks=counts.hit_blocks,
        miss_blocks=counts.miss_blocks,
        joined_blocks=counts.joined_blocks,
        loaded_blocks=counts.loaded_blocks,
        stored_blocks=counts.stored_blocks,
        bytes_loaded=counts.loaded_bytes,
        bytes_stored=counts.stored_blocks * size,
        load_seconds=copies.seconds[False],
        store_seconds=copies.seconds[True],
        load_rate=copies.rates[False].value,
        store_rate=copies.rates[True].value,
        evicted_blocks=counts.evicted_blocks,
        refused_blocks=counts.refused_blocks,
        dropped_blocks=counts.dropped_blocks,
        failed_copies=counts.failed_copies,
        policy_faults=counts.policy_faults,
        checksums_checked=checksums.checked,
        checksum_failures=checksums.failed,
        canary=not checksums.failed,
        loads_queued=submissions.queued(urgent=True),
        stores_queued=submissions.queued(urgent=False),
        copies=len(copies.batches),
        blocks_leased=leases.held(),
        places=table.capacity,
        places_wanted=pool.places,
        places_used=table.capacity - table.free,
        places_pinned=table.in_use,
        places_pending=table.pending,
        pool_bytes=pool.nbytes,
        bytes_by_plain=copies.moved("plain"),
        bytes_by_batch=copies.moved("batch"),
        bytes_by_staged=copies.moved("staged"),
        bytes_by_kernel=copies.moved("kernel"),
        attached=not table.orphaned(()),
    )
