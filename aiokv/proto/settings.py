"""The numbers that the protocol's timers and bounds use, in one place.

Times are integers of nanoseconds, as ``time.monotonic_ns()`` gives them: a lease is compared
between processes, and a float would round it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from aiokv.proto.fields import index

__all__ = ["SECOND", "Settings"]

#: Nanoseconds in a second.
SECOND = 1_000_000_000

#: Times in messages are less than this.
_MOST = 2**62

#: What one may do without.
_MAY_BE_ZERO = frozenset({"close_ns", "tombstone_ns", "tombstones"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Timers and bounds of one engine. Peers need not have the same ones, but for ``lease_ns``.

    Times are in nanoseconds. All are positive integers; ``close_ns``, ``tombstone_ns`` and
    ``tombstones`` may be 0.

    Attributes:
        contact_ns: First contact: how long a peer may take to answer HELLO.
        heartbeat_ns: Between peers that share a live part: how often each asks for a sign of life.
        liveness_ns: Silence after which a peer that shares a live part is given up.
        lease_ns: How long a one-sided reader may read on without hearing that it still may. Shorter
            than ``drain_ns``, so that a producer whose consumer fell silent is quiet within the
            drain bound.
        drain_ns: After a part was given up: how long it may take until nothing can touch its blocks
            any more.
        close_ns: On closing: how long to wait until peers acknowledged the last message.
        tombstone_ns: How long an ended transfer is remembered, so that a late grant is told what
            became of it.
        tombstones: Ended transfers remembered at most; the oldest go first.
        parked_per_peer: Grants (and offers) from one peer that wait for their other half, at most.
        peers: Peers that this engine talks to at most.
        chunk_bytes: Bytes that one submitted copy moves at most. On the host a chunk is copied in
            one go, so this bounds for how long the loop is held. Where the producer sends, chunks
            are four times larger, since sockets take them in slices; and a path that is faster than
            host memory (``Link.pace``) takes as many times more, here and in ``window_bytes``.
        window_bytes: Bytes of submitted copies that may be unfinished. What is submitted can't be
            called back, so this bounds how long an abort takes.
        staging_bytes: Of a cache on a GPU: pinned memory of the host that each link over ``shm`` and
            ``tcp`` has, at each end.
        pinned_bytes: Of a cache on a GPU: what all links over ``shm`` have of that at most, and as
            much those over ``tcp``; further links are refused. One is made in any case.
        nccl_staging_bytes: Memory of the GPU that all links over ``nccl`` share, for what they send,
            and as much for what they receive.

    Raises:
        TypeError: One is no integer.
        ValueError: One is out of range, or timers contradict each other.
    """

    contact_ns: int = 2 * SECOND
    heartbeat_ns: int = SECOND // 2
    liveness_ns: int = 3 * SECOND
    lease_ns: int = SECOND + SECOND // 2
    drain_ns: int = 2 * SECOND
    close_ns: int = SECOND
    tombstone_ns: int = 60 * SECOND
    tombstones: int = 65_536
    parked_per_peer: int = 1_024
    peers: int = 1_024
    chunk_bytes: int = 2 << 20
    window_bytes: int = 64 << 20
    staging_bytes: int = 128 << 20
    pinned_bytes: int = 8 << 30
    nccl_staging_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        """Refuse what is no number, and timers that contradict each other."""
        for each in fields(self):
            value, least = getattr(self, each.name), int(each.name not in _MAY_BE_ZERO)
            number = index(value, each.name)
            if not least <= number < _MOST:
                raise ValueError(
                    f"{each.name} is an integer of at least {least}, less than 2**62, not {value}"
                )
            object.__setattr__(self, each.name, number)
        if not self.heartbeat_ns * 2 <= self.lease_ns < self.drain_ns:
            raise ValueError(
                "timers must keep heartbeat_ns * 2 <= lease_ns < drain_ns, not "
                f"{self.heartbeat_ns} * 2 <= {self.lease_ns} < {self.drain_ns}"
            )
        if self.heartbeat_ns * 3 > self.liveness_ns:
            raise ValueError(
                f"liveness_ns={self.liveness_ns} is less than three heartbeats of {self.heartbeat_ns}, "
                "so that healthy peers would be given up"
            )
