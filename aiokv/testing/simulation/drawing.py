"""Draws a scenario from a seed: engines, what they ask of each other, and the mood of it all."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.settings import Settings
from aiokv.testing.faultynetwork import Faults
from aiokv.testing.simulation import trouble
from aiokv.testing.simulation.scenario import (
    FAST_S,
    Fault,
    FetchPlan,
    OfferPlan,
    Rank,
    Request,
    Scenario,
)

__all__ = ["MOODS", "Mood", "draw", "plain_request"]

#: What a scenario is about. "calm": nothing happens. "patient": pauses that do no harm. "fickle": users give
#: up. "lease": a producer gives up and its reader can't hear it. "any": all that can happen.
Mood = Literal["calm", "patient", "fickle", "lease", "any"]
MOODS: tuple[Mood, ...] = ("calm", "patient", "fickle", "lease", "any")
_WEIGHTS = (10, 15, 10, 15, 50)

_TRANSPORTS = (("memory",), ("sent",), ("memory", "sent"))
_AXES = ("sbthd", "bsthd", "bshtd", "bhtsd", "split")


def draw(seed: int | str, mood: Mood | None = None) -> Scenario:
    """The scenario of a seed.

    Args:
        seed: Decides everything.
        mood: What the scenario is about, if not what the seed says.
    """
    rng = random.Random(f"scenario {seed}")  # noqa: S311 - repeatable, not secret
    drawn = rng.choices(MOODS, _WEIGHTS)[0]
    mood = mood or drawn
    ranks = _ranks(rng)
    span = rng.choice((0.0, 0.01, 0.1, 2.0))
    requests = tuple(_request(rng, ranks, f"t{i}", span, f"{seed}/t{i}") for i in range(rng.randint(1, 6)))
    settings, channel = _settings(rng), _channel(rng, mood)
    faults: tuple[Fault, ...] = ()
    match mood:
        case "any":
            faults = tuple(trouble.fault(rng, ranks, requests) for _ in range(rng.randint(0, 4)))
        case "patient":
            requests = tuple(trouble.slow(rng, request) for request in requests)
            faults = tuple(trouble.harmless(rng, ranks, requests) for _ in range(rng.randint(1, 3)))
        case "fickle":
            ranks = tuple(replace(rank, step_s=min(rank.step_s, FAST_S / 2)) for rank in ranks)
            requests = tuple(trouble.given_up(rng, request) for request in requests)
        case "lease":
            settings = replace(settings, window_bytes=64 << 20)
            ranks, requests, faults = trouble.broken_promise(rng, ranks, requests)
    requests = _named(random.Random(f"names {seed}"), requests)  # noqa: S311
    rng = random.Random(f"holds {seed}")  # noqa: S311
    if mood != "patient":  # whose pauses are longer than anybody holds anything
        requests = tuple(_held(rng, request, certain=mood == "calm") for request in requests)
    transports = ("memory",) if mood == "lease" else rng.choices(_TRANSPORTS, (70, 20, 10))[0]
    return Scenario(
        seed=str(seed),
        settings=settings,
        ranks=ranks,
        requests=requests,
        faults=faults,
        channel=channel,
        transports=transports,
    )


def _named(rng: random.Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """In some worlds engines are called by several names, from the first contact on."""
    if rng.random() < 0.7:
        return requests
    return tuple(
        replace(
            request,
            offers=tuple(replace(plan, alias=rng.random() < 0.5) for plan in request.offers),
            fetches=tuple(replace(plan, alias=rng.random() < 0.5) for plan in request.fetches),
        )
        for request in requests
    )


def _held(rng: random.Random, request: Request, *, certain: bool) -> Request:
    """Some offers are held for a while only, and their readers wait for blocks, and say so.

    Args:
        rng: Decides.
        request: The request.
        certain: What is said is heard in time.
    """
    if rng.random() < 0.75:
        return request
    hold = rng.choice((1.0, 3.0))
    fetches = tuple(
        replace(plan, queued=rng.choice((0.0, 0.5, 3.0)) * hold, period=hold / 3) for plan in request.fetches
    )
    begins = min((plan.start for plan in request.offers), default=0.0)
    heard = certain and all(plan.start < begins + hold / 2 for plan in fetches)
    offers = tuple(replace(plan, hold=hold) for plan in request.offers)
    return replace(request, offers=offers, fetches=fetches, odd=request.odd or not heard)


def _settings(rng: random.Random) -> Settings:
    chunk = rng.choice((16, 64, 256, 1024, 2 << 20))
    return Settings(
        chunk_bytes=chunk,
        window_bytes=rng.choice((chunk, 4 * chunk, 64 << 20)),
        parked_per_peer=rng.choice((1, 2, 1024, 1024, 1024, 1024)),
        tombstones=rng.choice((1, 3, 65_536, 65_536)),
    )


def _channel(rng: random.Random, mood: Mood) -> Faults:
    delay = rng.choice((0.0, 0.0001) if mood == "lease" else (0.0, 0.0, 0.0001, 0.002, 0.05))
    noisy = mood == "any" and rng.random() < 0.3
    return Faults(
        drop=rng.choice((0.0, 0.01, 0.1)) if noisy else 0.0,
        duplicate=rng.choice((0.0, 0.0, 0.1, 0.5)),
        delay=(0.0, delay),
        reorder=rng.choice((0.0, 0.01, 0.1)) if noisy else 0.0,
    )


# -- engines


def _ranks(rng: random.Random) -> tuple[Rank, ...]:
    heads = rng.choice((1, 2, 2, 4, 4))
    shape = rng.choice(("attention", "attention", "attention", "mla", "both"))
    layers = rng.randint(1, 4)
    sizes = (rng.choice((2, 4, 8)), rng.choice(("uint8", "bfloat16")))

    def rank(share: tuple[int, int], *, produces: bool, consumes: bool) -> None:
        layout = _layout(rng, shape, layers, heads, share, sizes)
        later = rng.random()
        if later < 0.1:  # another model comes up at the same address
            following = CacheLayout(groups=layout.groups, model=b"other")
        elif later < 0.4:
            following = _layout(rng, shape, layers, heads, share, sizes)
        else:
            following = layout
        step_s = rng.choice((0.00001, 0.00005, 0.0002, 0.0002, 0.001, 0.005))
        made.append(Rank(len(made), layout, following, produces=produces, consumes=consumes, step_s=step_s))

    made: list[Rank] = []
    if rng.random() < 0.5:
        for _ in range(rng.randint(2, 4)):
            rank((0, heads), produces=True, consumes=True)
    else:
        for produces in (True, False):
            for share in _shares(rng, heads):
                rank(share, produces=produces, consumes=not produces)
        if len(made) < 5 and rng.random() < 0.4:
            rank((0, heads), produces=rng.random() < 0.5, consumes=True)
    return tuple(made)


def _shares(rng: random.Random, heads: int) -> list[tuple[int, int]]:
    """Heads split among one to three ranks, evenly or not."""
    cuts = sorted(rng.sample(range(1, heads), min(heads - 1, rng.choice((0, 1, 1, 1, 2)))))
    edges = [0, *cuts, heads]
    return list(pairwise(edges))


def _layout(
    rng: random.Random,
    shape: str,
    layers: int,
    heads: int,
    share: tuple[int, int],
    sizes: tuple[int, str],
) -> CacheLayout:
    head_size, dtype = sizes
    groups = []
    if shape != "mla":
        axes = rng.choice(_AXES)
        block_size = rng.choice((1, 2, 3, 4, 8))
        groups.append(
            GroupLayout(
                layers=tuple(range(layers)),
                blocks=160 // block_size,
                block_size=block_size,
                heads=share,
                total_heads=heads,
                head_size=head_size,
                dtype=dtype,
                axes="bthd" if axes == "split" else axes,
                split=axes == "split",
            )
        )
    if shape != "attention":
        block_size = rng.choice((1, 2, 4))
        groups.append(
            GroupLayout(
                layers=tuple(range(layers, layers + 2)) if groups else tuple(range(layers)),
                blocks=160 // block_size,
                block_size=block_size,
                heads=(0, 1),
                total_heads=1,
                head_size=head_size * 2,
                dtype=dtype,
                axes="btd",
                kind="mla",
            )
        )
    return CacheLayout(groups=tuple(groups), model=b"model")


# -- requests


def sources_for(ranks: tuple[Rank, ...], consumer: Rank, pick: random.Random) -> tuple[int, ...]:
    """Ranks that together hold the consumer's heads, each of which it needs; empty if there are none."""
    others = [rank for rank in ranks if rank.produces and rank is not consumer]
    first, last = consumer.layout.groups[0].heads
    pick.shuffle(others)
    chosen: list[int] = []
    while first < last:
        for rank in others:
            low, high = rank.layout.groups[0].heads
            if low <= first < high and rank.number not in chosen:
                chosen.append(rank.number)
                first = high
                break
        else:
            return ()
    return tuple(chosen)


def plain_request(
    ranks: tuple[Rank, ...], consumer: Rank, tid: str, tokens: int, rng: random.Random, *, start: float = 0.0
) -> Request | None:
    """A request that nothing is wrong with; None where no ranks hold what the consumer needs."""
    sources = sources_for(ranks, consumer, rng)
    if not sources:
        return None
    offers = tuple(OfferPlan(rank=rank, start=start, readers=1, seed=f"{tid}/{rank}") for rank in sources)
    fetch = FetchPlan(
        rank=consumer.number, start=start, sources=sources, room=tokens, seed=f"{tid}/{consumer.number}"
    )
    return Request(tid=tid, tokens=tokens, offers=offers, fetches=(fetch,))


def _request(rng: random.Random, ranks: tuple[Rank, ...], tid: str, span: float, seed: str) -> Request:
    start, tokens = rng.random() * span, rng.randint(1, 20)
    candidates = [rank for rank in ranks if rank.consumes]
    consumers = rng.sample(candidates, min(len(candidates), rng.choice((1, 1, 1, 2, 3))))
    asked: dict[int, tuple[int, ...]] = {}
    for consumer in consumers:
        sources = sources_for(ranks, consumer, rng)
        if sources and consumer.number not in {s for each in asked.values() for s in each}:
            asked[consumer.number] = sources
    for number in [n for n in asked if any(n in sources for sources in asked.values())]:
        del asked[number]  # it is another one's source
    push = rng.random() < 0.4
    offers = []
    for source in sorted({s for sources in asked.values() for s in sources}):
        readers = [number for number, sources in asked.items() if source in sources]
        offers.append(
            OfferPlan(
                rank=source,
                start=_offset(rng, start),
                readers=len(readers),
                to=tuple(readers) if push else (),
                pace=rng.choice((0.0, 0.0001, 0.001, 0.02)),
                order=rng.choice(("forward", "forward", "shuffled", "late")),
                seed=f"{seed}/{source}",
            )
        )
    fetches = [
        FetchPlan(
            rank=number,
            start=_offset(rng, start),
            sources=None if push and rng.random() < 0.8 else sources,
            parts=len(sources),
            first_token=rng.choice((0, 0, 0, rng.randrange(tokens + 1))),
            room=tokens + rng.choice((0, 0, 3)),
            priority=rng.choice((0, 0, 1)),
            body=rng.choice(("nothing", "layers", "each", "ordered", "waiters")),
            busy=rng.random() < 0.4,
            style=rng.choice(("with", "with", "with", "start")),
            seed=f"{seed}/{number}",
        )
        for number, sources in asked.items()
    ]
    fetches = [
        replace(fetch, tokens=tokens) if rng.random() < 0.3 or fetch.first_token == tokens else fetch
        for fetch in fetches
    ]
    request = Request(
        tid=tid,
        tokens=tokens,
        offers=tuple(offers),
        fetches=tuple(fetches),
        odd=not offers,
        retry=rng.random() < 0.4,
    )
    while rng.random() < 0.35:
        request = trouble.misbehave(rng, request)
    return request


def _offset(rng: random.Random, start: float) -> float:
    mean = rng.choice((0.0, 0.0, 0.0005, 0.02, 0.5))
    return start + (rng.expovariate(1 / mean) if mean else 0.0)
