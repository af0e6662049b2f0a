"""What goes wrong in a scenario: users who give up or misbehave, and what the world does to engines."""

from __future__ import annotations

import random
from dataclasses import replace

from aiokv.testing.faultynetwork import Faults
from aiokv.testing.simulation.scenario import (
    MOST_SILENCE_S,
    Fault,
    FaultKind,
    FetchPlan,
    OfferPlan,
    Rank,
    Request,
    Side,
)

__all__ = ["broken_promise", "fault", "given_up", "harmless", "misbehave", "slow"]


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


# -- users


def misbehave(rng: random.Random, request: Request) -> Request:
    """The request with one thing about it changed that may make it fail."""
    if not request.sides:
        return request
    victim = rng.choice(request.sides)
    kinds = ("cancel", "cancel", "deadline", "deadline", "raise", "timeout", "gone", "twice", "odd")
    match rng.choice(kinds):
        case "cancel":
            first = _log_uniform(rng, 1e-5, 2.0)
            more = tuple(first + _log_uniform(rng, 1e-5, 2.0) for _ in range(rng.choice((0, 0, 1, 3))))
            return _with(request, victim, replace(victim, cancels=(first, *more)))
        case "deadline":
            return _with(request, victim, replace(victim, deadline=_log_uniform(rng, 1e-3, 4.0)))
        case "raise":
            return _with(request, victim, replace(victim, raises=rng.randrange(3), style="with"))
        case "timeout":
            return _with(request, victim, replace(victim, timeout=_log_uniform(rng, 1e-4, 3.0)))
        case "gone":
            return _with(request, victim)
        case "twice":
            later = victim.start + rng.choice((0.0, 0.001, 0.1))
            return _with(request, victim, victim, replace(victim, start=later, seed=victim.seed + "+"))
        case _:
            return _with(request, victim, _odd_numbers(rng, request, victim))


def _odd_numbers(rng: random.Random, request: Request, victim: Side) -> Side:
    if isinstance(victim, OfferPlan):
        return replace(victim, readers=max(len(victim.to), 1, victim.readers + rng.choice((-1, 1))))
    match rng.randrange(3):
        case 0:
            return replace(victim, tokens=request.tokens + 2, room=request.tokens + 2)
        case 1:
            return replace(victim, room=max(1, victim.first_token, request.tokens - 2), tokens=None)
        case _:
            return replace(victim, parts=victim.parts + 1, sources=None)


def _with(request: Request, old: Side, *new: Side) -> Request:
    """The request with a side in place of another, or with more or none; it may fail now."""
    sides: list[Side] = []
    for side in request.sides:
        sides += new if side is old else (side,)
    return replace(
        request,
        offers=tuple(side for side in sides if isinstance(side, OfferPlan)),
        fetches=tuple(side for side in sides if isinstance(side, FetchPlan)),
        odd=True,
    )


# -- faults


_KINDS: tuple[FaultKind, ...] = (
    "freeze", "freeze", "freeze", "jump", "kill", "kill", "close", "cut", "cut", "cut off", "noise",
    "unlink", "stall device", "fail device",
)  # fmt: skip
_HARMLESS: tuple[FaultKind, ...] = ("freeze", "freeze", "jump", "cut", "stall device")


def fault(
    rng: random.Random,
    ranks: tuple[Rank, ...],
    requests: tuple[Request, ...],
    kinds: tuple[FaultKind, ...] = _KINDS,
) -> Fault:
    """Something that the world does to an engine, near the time at which something begins."""
    sides = [side for request in requests for side in request.sides]
    near = rng.choice(sides).start if sides else 0.0
    kind = rng.choice(kinds)
    rank, other = rng.sample(range(len(ranks)), 2)
    lasts = _log_uniform(rng, 0.02, 8.0)
    if kind in ("kill", "close") and rng.random() < 0.4:
        lasts = 0.0
    noise = Faults(drop=rng.choice((0.05, 0.5)), reorder=rng.choice((0.0, 0.3)), duplicate=0.3)
    return Fault(
        at=near + _log_uniform(rng, 1e-5, 2.0),
        kind=kind,
        rank=rank,
        other=other,
        lasts=lasts,
        flag=rng.random() < 0.5,
        second_flag=rng.random() < 0.5,
        noise=noise,
    )


def harmless(rng: random.Random, ranks: tuple[Rank, ...], requests: tuple[Request, ...]) -> Fault:
    """A fault that does no harm."""
    found = fault(rng, ranks, requests, _HARMLESS)
    lasts = rng.random() * (6.0 if found.kind in ("jump", "stall device") else MOST_SILENCE_S / 3)
    return replace(found, lasts=lasts, second_flag=True)


def slow(rng: random.Random, request: Request) -> Request:
    """The request, made to last for a while."""
    offers = tuple(replace(offer, pace=rng.choice((offer.pace, 0.1, 0.5))) for offer in request.offers)
    return replace(request, offers=offers)


def given_up(rng: random.Random, request: Request) -> Request:
    """The request with a side that gives up while bytes move."""
    if not request.sides:
        return request
    victim = rng.choice(request.sides)
    after = max(side.start for side in request.sides) - victim.start + _log_uniform(rng, 2e-4, 0.05)
    if rng.random() < 0.7:
        return _with(request, victim, replace(victim, cancels=(after,)))
    return _with(request, victim, replace(victim, deadline=after))


def broken_promise(
    rng: random.Random, ranks: tuple[Rank, ...], requests: tuple[Request, ...]
) -> tuple[tuple[Rank, ...], tuple[Request, ...], tuple[Fault, ...]]:
    """The producer gives up where the consumer can't hear it, and the consumer's copies are late."""
    whole = [request for request in requests if request.offers and request.fetches]
    if not whole:
        return ranks, requests, ()
    request = rng.choice(whole)
    offer, fetch = rng.choice(request.offers), rng.choice(request.fetches)
    old_offer = offer
    # Layers are ready at once, so that copies are under way when the consumer is cut off.
    offer = replace(offer, pace=rng.choice((0.0, 0.0001)), order="forward")
    ranks = tuple(
        replace(rank, step_s=0.00001 if rank.number == offer.rank else rng.choice((0.0001, 0.0005)))
        for rank in ranks
    )
    met = max(offer.start, fetch.start)
    hot = met + _log_uniform(rng, 1e-3, 0.2)
    match rng.randrange(3):
        case 0 | 1:
            offer = replace(offer, cancels=(hot - offer.start + _log_uniform(rng, 1e-4, 0.5),))
        case _:
            offer = replace(offer, deadline=hot - offer.start + _log_uniform(rng, 1e-4, 0.5))
    # A patient reader, that would believe what it gets.
    patient = replace(fetch, deadline=30.0, cancels=(), timeout=0.0, raises=-1)
    changed = _with(_with(request, old_offer, offer), fetch, patient)
    cut = Fault(
        at=hot,
        kind="cut",
        rank=offer.rank,
        other=fetch.rank,
        lasts=_log_uniform(rng, 0.5, 8.0),
        flag=rng.random() < 0.5,
        second_flag=rng.random() < 0.3,
    )
    faults = [
        *([cut] if rng.random() < 0.7 else []),
        Fault(
            at=rng.choice((met, met, hot)),
            kind="stall device",
            rank=fetch.rank,
            lasts=hot - met + 1.0 + 2.2 * rng.random(),
        ),
    ]
    if rng.random() < 0.2:
        faults.append(Fault(at=hot, kind="freeze", rank=fetch.rank, lasts=_log_uniform(rng, 0.5, 8.0)))
    return ranks, tuple(changed if each is request else each for each in requests), tuple(faults)
