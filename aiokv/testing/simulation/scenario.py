"""What happens in one simulated world: drawn from a seed, and nothing else.

A scenario says which engines there are, who offers and fetches what and when, how each of them misbehaves,
and what the world does to them. It holds no code and no state, so that parts of it can be left out to find
out which of them a failure needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Literal

from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.settings import Settings
from aiokv.testing.channel import Faults

__all__ = ["Fault", "FetchPlan", "OfferPlan", "Rank", "Request", "Scenario", "draw", "plain_request"]

FaultKind = Literal[
    "freeze", "jump", "kill", "close", "cut", "cut off", "noise", "unlink", "stall device", "fail device"
]

#: How a user goes about a transfer. "with": async with. "start": start, wait, cancel.
Style = Literal["with", "start"]

#: What a scenario is about. "calm": nothing happens. "patient": pauses that do no harm. "fickle": users give
#: up. "lease": a producer gives up and its reader can't hear it. "any": all that can happen.
Mood = Literal["calm", "patient", "fickle", "lease", "any"]
_MOODS: tuple[Mood, ...] = ("calm", "patient", "fickle", "lease", "any")
_WEIGHTS = (10, 15, 10, 15, 50)

_AXES = ("sbthd", "bsthd", "bshtd", "bhtsd", "split")


#: Silence that nobody may be given up for, less than the bounds of first contact and liveness (s).
MOST_SILENCE_S = 1.5
#: A device that takes less for a step (s) is done with all that may be in flight in no time.
FAST_S = 0.0005
#: Jumps of the time that are long enough to be noticed as one's own fault (s).
NOTICED_S = 1.0
#: Time that may be lost before deadlines of half a minute can't be kept (s).
MOST_LOST_S = 20.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine."""

    number: int
    layout: CacheLayout
    #: Layout of its next lives, where that is another one.
    next_layout: CacheLayout
    #: May offer; may fetch.
    produces: bool
    consumes: bool
    #: Seconds between steps of its device, on average.
    step_s: float

    @property
    def address(self) -> str:
        """Of its control channel."""
        return f"memory://e{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SidePlan:
    rank: int
    #: Seconds from the beginning.
    start: float
    deadline: float = 30.0
    #: Seconds from its start at which its task is cancelled.
    cancels: tuple[float, ...] = ()
    #: Seconds after which ``asyncio.timeout`` strikes; 0 without.
    timeout: float = 0.0
    #: The body raises before this layer; -1: it doesn't.
    raises: int = -1
    style: Style = "with"
    seed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPlan(_SidePlan):
    """A producer's side of a request."""

    readers: int
    #: Ranks that are told of it (push).
    to: tuple[int, ...] = ()
    #: Seconds that the model takes for a layer, on average.
    pace: float = 0.001
    #: How layers are announced: as they are computed, in another order, or all when the body is left.
    order: Literal["forward", "shuffled", "late"] = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan(_SidePlan):
    """A consumer's side of a request."""

    #: Ranks to fetch from; None: wait for ``parts`` offers that name this one.
    sources: tuple[int, ...] | None
    parts: int = 1
    first_token: int = 0
    #: None: as many as are offered.
    tokens: int | None = None
    #: Tokens that the blocks have room for.
    room: int = 0
    priority: int = 0
    #: What the body does: nothing, layers as they land, layers in order, ordered on the stream, many waiters.
    body: Literal["nothing", "layers", "each", "ordered", "waiters"] = "nothing"
    #: The caller's stream has work on the blocks when the fetch begins.
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One transfer id, and all who take part."""

    tid: str
    attempt: int = 0
    tokens: int
    offers: tuple[OfferPlan, ...]
    fetches: tuple[FetchPlan, ...]
    #: Somebody does what can't end well; what becomes of it isn't asked.
    odd: bool = False
    #: Whether a router would try again after a failure.
    retry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that the world does to engines."""

    at: float
    kind: FaultKind
    rank: int = 0
    other: int = 0
    #: Seconds until it is over: thawed, healed, started again; 0: never.
    lasts: float = 0.0
    #: For each kind its own: both ways or not, frames kept or not, another layout or not.
    flag: bool = False
    second_flag: bool = False
    noise: Faults = field(default_factory=Faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that is decided before the world begins."""

    seed: str
    settings: Settings
    ranks: tuple[Rank, ...]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    channel: Faults

    @property
    def quiet(self) -> bool:
        """Nothing at all is done to the engines, their devices are fast, and the network loses nothing."""
        fast = all(rank.step_s < FAST_S for rank in self.ranks)
        return fast and not self.faults and not self.channel.drop and not self.channel.reorder

    @property
    def calm(self) -> bool:
        """Nothing happens that could make a well-meant transfer fail.

        Nobody is declared dead for a silence that is shorter than the bounds, nor for one's own: a process
        that stands still for a while, frames that come late, and time that jumps for all do no harm.
        """
        if self.channel.drop or self.channel.reorder:
            return False
        silent = jumps = 0.0
        for fault in self.faults:
            held = fault.kind in ("cut", "cut off") and fault.second_flag
            # A short jump is not noticed, so it counts as the others' silence.
            if fault.kind == "freeze" or held or (fault.kind == "jump" and fault.lasts < NOTICED_S):
                silent += fault.lasts
            elif fault.kind in ("jump", "stall device"):
                jumps += fault.lasts
            else:
                return False
        return silent < MOST_SILENCE_S and silent + jumps < MOST_LOST_S


def draw(seed: int | str) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")  # noqa: S311 - repeatable, not secret
    mood: Mood = rng.choices(_MOODS, _WEIGHTS)[0]
    ranks = _ranks(rng)
    span = rng.choice((0.0, 0.01, 0.1, 2.0))
    requests = tuple(_request(rng, ranks, f"t{i}", span, f"{seed}/t{i}") for i in range(rng.randint(1, 6)))
    settings, channel = _settings(rng), _channel(rng, mood)
    faults: tuple[Fault, ...] = ()
    match mood:
        case "any":
            faults = tuple(_fault(rng, ranks, requests, _KINDS) for _ in range(rng.randint(0, 4)))
        case "patient":
            requests = tuple(_slow(rng, request) for request in requests)
            faults = tuple(_harmless(rng, ranks, requests) for _ in range(rng.randint(1, 3)))
        case "fickle":
            ranks = tuple(replace(rank, step_s=min(rank.step_s, FAST_S / 2)) for rank in ranks)
            requests = tuple(_given_up(rng, request) for request in requests)
        case "lease":
            settings = replace(settings, window_bytes=64 << 20)
            ranks, requests, faults = _broken_promise(rng, ranks, requests)
    return Scenario(
        seed=str(seed), settings=settings, ranks=ranks, requests=requests, faults=faults, channel=channel
    )


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


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
        made.append(
            Rank(len(made), layout, following, produces=produces, consumes=consumes, step_s=step_s)
        )

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
    return list(zip(edges, edges[1:], strict=False))


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
        request = _misbehave(rng, request)
    return request


def _offset(rng: random.Random, start: float) -> float:
    mean = rng.choice((0.0, 0.0, 0.0005, 0.02, 0.5))
    return start + (rng.expovariate(1 / mean) if mean else 0.0)


def _misbehave(rng: random.Random, request: Request) -> Request:
    """The request with one thing about it changed that may make it fail."""
    offers, fetches = list(request.offers), list(request.fetches)
    sides = [*offers, *fetches]
    if not sides:
        return request
    victim = rng.choice(sides)
    changed: OfferPlan | FetchPlan | None = victim
    match rng.choice(("cancel", "cancel", "deadline", "deadline", "raise", "timeout", "gone", "twice", "odd")):
        case "cancel":
            first = _log_uniform(rng, 1e-5, 2.0)
            more = tuple(first + _log_uniform(rng, 1e-5, 2.0) for _ in range(rng.choice((0, 0, 1, 3))))
            changed = replace(victim, cancels=(first, *more))
        case "deadline":
            changed = replace(victim, deadline=_log_uniform(rng, 1e-3, 4.0))
        case "raise":
            changed = replace(victim, raises=rng.randrange(3), style="with")
        case "timeout":
            changed = replace(victim, timeout=_log_uniform(rng, 1e-4, 3.0))
        case "gone":
            changed = None
        case "twice":
            more_plan = replace(victim, start=victim.start + rng.choice((0.0, 0.001, 0.1)), seed=victim.seed + "+")
            (offers if isinstance(more_plan, OfferPlan) else fetches).append(more_plan)  # type: ignore[arg-type]
        case _:
            changed = _odd_numbers(rng, request, victim)
    return replace(
        request,
        offers=tuple(_swapped(offers, victim, changed)),
        fetches=tuple(_swapped(fetches, victim, changed)),
        odd=True,
    )


def _odd_numbers(
    rng: random.Random, request: Request, victim: OfferPlan | FetchPlan
) -> OfferPlan | FetchPlan:
    if isinstance(victim, OfferPlan):
        return replace(victim, readers=max(len(victim.to), 1, victim.readers + rng.choice((-1, 1))))
    match rng.randrange(3):
        case 0:
            return replace(victim, tokens=request.tokens + 2, room=request.tokens + 2)
        case 1:
            return replace(victim, room=max(1, victim.first_token, request.tokens - 2), tokens=None)
        case _:
            return replace(victim, parts=victim.parts + 1, sources=None)


def _swapped(sides: list, victim: object, changed: object | None) -> list:  # type: ignore[type-arg]
    return [changed if side is victim else side for side in sides if side is not victim or changed is not None]


# -- faults


_KINDS: tuple[FaultKind, ...] = (
    "freeze", "freeze", "freeze", "jump", "kill", "kill", "close", "cut", "cut", "cut off", "noise",
    "unlink", "stall device", "fail device",
)  # fmt: skip
_HARMLESS: tuple[FaultKind, ...] = ("freeze", "freeze", "jump", "cut", "stall device")


def _fault(
    rng: random.Random, ranks: tuple[Rank, ...], requests: tuple[Request, ...], kinds: tuple[FaultKind, ...]
) -> Fault:
    sides = [side for request in requests for side in (*request.offers, *request.fetches)]
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


def _harmless(rng: random.Random, ranks: tuple[Rank, ...], requests: tuple[Request, ...]) -> Fault:
    """A fault that does no harm."""
    fault = _fault(rng, ranks, requests, _HARMLESS)
    lasts = rng.random() * (6.0 if fault.kind in ("jump", "stall device") else MOST_SILENCE_S / 3)
    return replace(fault, lasts=lasts, second_flag=True)


def _slow(rng: random.Random, request: Request) -> Request:
    """The request, made to last for a while."""
    offers = tuple(replace(offer, pace=rng.choice((offer.pace, 0.1, 0.5))) for offer in request.offers)
    return replace(request, offers=offers)


def _given_up(rng: random.Random, request: Request) -> Request:
    """The request with a side that gives up while bytes move."""
    sides = [*request.offers, *request.fetches]
    if not sides:
        return request
    victim = rng.choice(sides)
    after = max(side.start for side in sides) - victim.start + _log_uniform(rng, 2e-4, 0.05)
    changed: OfferPlan | FetchPlan
    if rng.random() < 0.7:
        changed = replace(victim, cancels=(after,))
    else:
        changed = replace(victim, deadline=after)
    return replace(
        request,
        offers=tuple(_swapped(list(request.offers), victim, changed)),
        fetches=tuple(_swapped(list(request.fetches), victim, changed)),
        odd=True,
    )


def _broken_promise(
    rng: random.Random, ranks: tuple[Rank, ...], requests: tuple[Request, ...]
) -> tuple[tuple[Rank, ...], tuple[Request, ...], tuple[Fault, ...]]:
    """The producer gives up where the consumer can't hear it, and the consumer's copies are late."""
    whole = [request for request in requests if request.offers and request.fetches]
    if not whole:
        return ranks, requests, ()
    request = rng.choice(whole)
    offer, fetch = rng.choice(request.offers), rng.choice(request.fetches)
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
    changed = replace(
        request,
        offers=tuple(offer if each.rank == offer.rank else each for each in request.offers),
        fetches=tuple(patient if each.rank == fetch.rank else each for each in request.fetches),
        odd=True,
    )
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
