"""What an engine did so far, as one frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from aiokv.device.poller import PollerStatistics
from aiokv.engine.histogram import Times

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts since the engine was started, and what is going on now.

    Attributes:
        bytes_received: Bytes that came into this engine's cache.
        bytes_sent: Bytes that left it: handed over to transports that send, and what was read
            through the others, once the reader confirmed that all of its part is in place. What
            a reader took of a part that ended otherwise is not known.
        received_by_transport: ``bytes_received`` by the name of the transport.
        sent_by_transport: ``bytes_sent`` by the name of the transport.
        parts_ended: Ended parts by outcome: ``landed``, ``failed``, ``aborted``.
        state_times: How long parts were in the states that they have left, by role (``producer``,
            ``consumer``) and state (``offered``, ``granted``, ``moving``, ``draining``).
        offers: Offers going on now.
        fetches: Fetches going on now.
        parts: Parts with a session, going on now.
        parked: Grants and offers of peers that wait here for their other half.
        leases: Leases of blocks that are out: one for each transfer going on.
        blocks_held: Blocks held by them.
        quarantined: Leases that stay out, since their blocks never became quiet.
        blocks_quarantined: Blocks of those.
        parts_queued: Parts with bytes that may move and wait for their turn.
        in_flight: Submitted copies that have not completed.
        bytes_in_flight: Their bytes, as they count in the window.
        window_bytes: How many that may be at most.
        sessions: Sessions that are up or being brought up.
        sessions_lost: Sessions with live parts that were lost.
        frames_sent: Control frames sent.
        frames_received: Control frames received.
        frames_stray: Those of them that belonged to no session.
        turns: Turns of the loop in which the engine worked.
        loop_lag_max: How late the engine's timer came at worst (seconds): how long the loop was
            held by others.
        loop_lags: The same, each time.
        completion: What the completion poller did; times in nanoseconds.
    """

    bytes_received: int
    bytes_sent: int
    received_by_transport: dict[str, int]
    sent_by_transport: dict[str, int]
    parts_ended: dict[str, int]
    state_times: dict[tuple[str, str], Times]
    offers: int
    fetches: int
    parts: int
    parked: int
    leases: int
    blocks_held: int
    quarantined: int
    blocks_quarantined: int
    parts_queued: int
    in_flight: int
    bytes_in_flight: int
    window_bytes: int
    sessions: int
    sessions_lost: int
    frames_sent: int
    frames_received: int
    frames_stray: int
    turns: int
    loop_lag_max: float
    loop_lags: Times
    completion: PollerStatistics
