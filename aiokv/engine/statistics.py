"""What an engine did so far, as one frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts since the engine was started, and what is going on now."""

    #: Bytes that came into this engine's cache, and (on transports that send) left it.
    bytes_received: int
    bytes_sent: int
    #: Ended parts by outcome: ``landed``, ``failed``, ``aborted``.
    parts_ended: dict[str, int]
    #: Transfers going on now.
    offers: int
    fetches: int
    #: Parts with a session, going on now.
    parts: int
    #: Grants and offers of peers that wait here for their other half.
    parked: int
    #: Leases that are out, blocks held by them, and leases that stay out since blocks never became quiet.
    leases: int
    blocks_held: int
    quarantined: int
    #: Submitted copies that have not completed.
    in_flight: int
    #: Sessions that are up or being brought up, and sessions with live parts that were lost.
    sessions: int
    sessions_lost: int
    #: Control frames.
    frames_sent: int
    frames_received: int
    frames_stray: int
    #: Turns of the loop in which the engine worked.
    turns: int
    #: How late the engine's timer came at worst (seconds): how long the loop was held by others.
    loop_lag_max: float
