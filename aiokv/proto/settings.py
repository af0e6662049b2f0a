"""The numbers that the protocol's timers and bounds use, in one place.

Times are integers of nanoseconds, as ``time.monotonic_ns()`` gives them: a lease is compared
between processes, and a float would round it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SECOND", "Settings"]

#: Nanoseconds in a second.
SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Timers and bounds of one engine. Peers need not have the same ones, but for ``lease_ns``."""

    #: First contact: how long a peer may take to answer HELLO.
    contact_ns: int = 2 * SECOND
    #: Between peers that share a live part: how often each asks for a sign of life.
    heartbeat_ns: int = SECOND // 2
    #: Silence after which a peer that shares a live part is given up.
    liveness_ns: int = 3 * SECOND
    #: How long a one-sided reader may read on without hearing that it still may. Shorter than
    #: ``drain_ns``, so that a producer whose consumer fell silent is quiet within the drain bound.
    lease_ns: int = SECOND + SECOND // 2
    #: After a part was given up: how long it may take until nothing can touch its blocks any more.
    drain_ns: int = 2 * SECOND
    #: On closing: how long to wait until peers acknowledged the last message.
    close_ns: int = SECOND
    #: How long an ended transfer is remembered, so that a late grant is told what became of it.
    tombstone_ns: int = 60 * SECOND
    #: Ended transfers remembered at most; the oldest go first.
    tombstones: int = 65_536
    #: Grants (and offers) from one peer that wait for their other half, at most.
    parked_per_peer: int = 1_024
    #: Peers that this engine talks to at most.
    peers: int = 1_024
    #: Bytes that one submitted copy moves at most. On the host a chunk is copied in one go, so
    #: this bounds for how long the loop is held.
    chunk_bytes: int = 2 << 20
    #: Bytes of submitted copies that may be unfinished. What is submitted can't be called back,
    #: so this bounds how long an abort takes.
    window_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Refuse timers that contradict each other."""
        if not 0 < self.heartbeat_ns * 2 <= self.lease_ns < self.drain_ns:
            raise ValueError("timers must keep heartbeat * 2 <= lease < drain bound")
        if self.heartbeat_ns * 3 > self.liveness_ns:
            raise ValueError("liveness must be at least three heartbeats, or healthy peers flap")
        if min(self.chunk_bytes, self.window_bytes, self.contact_ns, self.parked_per_peer) <= 0:
            raise ValueError("bounds must be positive")
