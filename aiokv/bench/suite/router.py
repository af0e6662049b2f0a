"""What the router costs: 500 streams of 4 tokens a second through it, beside the same servers asked directly.

The servers are scripted and processes of their own, as is the router. Asked directly, the client sends each
request to both servers itself, so that both ways do the same work but for the router's. Also: how long it
takes until both servers have given up a request whose client went away, and until a killed one gets none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop

from aiokv.bench.child import Child, child
from aiokv.bench.figures import Spread, over, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

if TYPE_CHECKING:
    from aiokv.bench.routing import Stream

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "router.ttft_p50_ms": Goal(2, "lower"),
    "router.ttft_p99_ms": Goal(20, "lower"),
    "router.throughput_over_direct": Goal(None, "higher"),
    "router.abort_p99_s": Goal(1, "lower"),
}

_STREAMS, _PACE = 500, 0.25
#: Tokens of a paced stream, and of one that is as fast as it can be.
_PACED_TOKENS, _FAST_TOKENS = 12, 200
#: Streams at once that are as fast as they can be.
_FAST = 16
_INTERVAL = 0.5


def missing() -> str:
    """What this machine lacks for it."""
    lacking = [name for name in ("aiohttp", "prometheus_client") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)}: pip install 'aiokv[router]'" if lacking else ""


@dataclass
class _Site:
    """A router and its servers."""

    router: Child
    http: str
    prefills: list[Child] = field(default_factory=list)
    decodes: list[Child] = field(default_factory=list)
    #: Of each server, its URL and the headers that it wants.
    at: dict[int, tuple[str, dict[str, str]]] = field(default_factory=dict)
    number: int = 0

    def name(self) -> str:
        """Of the next request."""
        self.number += 1
        return f"r{self.number}"

    async def tell(self, tokens: int, pace: float, mode: str = "answer") -> None:
        """What servers answer from now on."""
        for server in self.prefills + self.decodes:
            await server.ask("become", tokens=tokens, pace=pace, mode=mode)


@asynccontextmanager
async def _site(each: int) -> AsyncIterator[_Site]:
    """A router with so many servers of each role, all up."""
    from aiokv.bench.routing import ROUTER, SERVER

    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(child(ROUTER))
        said = await router.heard()
        site = _Site(router, said["http"])
        options = {"router": said["control"], "tokens": _PACED_TOKENS, "pace": _PACE, "interval": _INTERVAL}
        for role, servers in (("prefill", site.prefills), ("decode", site.decodes)):
            for _ in range(each):
                servers.append(await stack.enter_async_context(child(SERVER, role=role, **options)))
        for server in site.prefills + site.decodes:  # they start at the same time
            known = await server.heard()
            site.at[server.pid] = known["http"], {"Authorization": f"Bearer {known['token']}"}
        while len((await router.ask())["up"]) < 2 * each:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.05)
        yield site


class _Load:
    """Requests to a site, by the router or directly."""

    def __init__(self, site: _Site, *, direct: bool) -> None:
        self._site, self._direct = site, direct
        self.firsts: list[float] = []
        self.tokens = 0
        self.broken = 0

    def _count(self, events: int) -> None:
        self.tokens += events

    async def one(self) -> None:
        """One stream to its end."""
        from aiokv.bench.routing import Stream, asked

        name, site = self._site.name(), self._site
        if not self._direct:
            streams = [
                await Stream.open(
                    site.http, asked(name, stream=True, transfer=False), {}, on_token=self._count
                )
            ]
        else:
            (prefill, shown), (decode, also) = (
                site.at[side[0].pid] for side in (site.prefills, site.decodes)
            )
            body = asked(name, stream=True, transfer=True)
            before = asked(name, stream=False, transfer=True)
            streams = [
                await Stream.open(decode, body, also, on_token=self._count),
                await Stream.open(prefill, before, shown),
            ]
        whole = await asyncio.gather(*(stream.over for stream in streams))
        self.broken += not all(whole)
        self.firsts.append(streams[0].first)

    async def paced(self, seconds: float) -> list[float]:
        """500 streams at once, each followed by another one; times to first tokens (s), sorted."""
        end = asyncio.get_running_loop().time() + seconds

        async def repeated(delay: float) -> None:
            await asyncio.sleep(delay)
            while asyncio.get_running_loop().time() < end:
                await self.one()

        # Begun evenly within the life of a stream, so that they also end so.
        life = _PACED_TOKENS * _PACE
        async with asyncio.TaskGroup() as group:
            for number in range(_STREAMS):
                group.create_task(repeated(life * number / _STREAMS))
        return sorted(self.firsts)

    async def fast(self, count: int) -> float:
        """Streams as fast as they come; tokens a second."""
        began, left = time.monotonic(), iter(range(count))

        async def repeated() -> None:
            for _ in left:
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(_FAST):
                group.create_task(repeated())
        return self.tokens / (time.monotonic() - began)


async def _first_tokens(site: _Site, report: Report, options: Options) -> None:
    seconds, rounds = (3.0, 1) if options.quick else (12.0, 5)
    used: list[float] = []

    async def through() -> list[float]:
        before = (await site.router.ask())["cpu"]
        began = time.monotonic()
        load = _Load(site, direct=False)
        found = await load.paced(seconds)
        used.append(((await site.router.ask())["cpu"] - before) / 1e9 / (time.monotonic() - began))
        _check(load)
        return found

    async def directly() -> list[float]:
        load = _Load(site, direct=True)
        found = await load.paced(seconds)
        _check(load)
        return found

    found = await alternate(rounds, {"router": through, "direct": directly}, warm=0 if options.quick else 1)
    for way, times in found.items():
        cells = {f"p{share} ms": Spread.of(_ms(each, share) for each in times) for share in (50, 90, 99)}
        streams = Spread.of(len(each) for each in times)
        report.row("first token, 500 streams of 4 tokens a second", {"way": way, **cells, "streams": streams})
    for share in (50, 99):
        added = [
            _ms(mine, share) - _ms(theirs, share)
            for mine, theirs in zip(found["router"], found["direct"], strict=True)
        ]
        report.ratio(f"router.ttft_p{share}_ms", added)
    report.row(
        "the router's process", {"what": "CPU with 500 paced streams, share of a core", "is": Spread.of(used)}
    )


def _check(load: _Load) -> None:
    if load.broken:
        raise RuntimeError(f"{load.broken} streams of {len(load.firsts)} broke off")


def _ms(times: list[float], share: int) -> float:
    return quantile(times, share / 100) * 1e3


async def _throughput(site: _Site, report: Report, options: Options) -> None:
    count, rounds = (32, 1) if options.quick else (160, 5)
    await site.tell(_FAST_TOKENS, 0.0)

    async def measured(*, direct: bool) -> float:
        load = _Load(site, direct=direct)
        rate = await load.fast(count)
        _check(load)
        return rate

    found = await alternate(
        rounds, {"router": lambda: measured(direct=False), "direct": lambda: measured(direct=True)}
    )
    for way, rates in found.items():
        report.row(f"{_FAST} streams unpaced", {"way": way, "tokens a second": Spread.of(rates)})
    report.ratio("router.throughput_over_direct", over(found["router"], found["direct"]))


async def _held(site: _Site, report: Report, options: Options) -> None:
    """Memory of idle streams: servers that stop after two tokens hold all streams open."""
    count = 100 if options.quick else _STREAMS
    await site.tell(_PACED_TOKENS, 0.0, "stop")
    warm = await _opened(site, 8)
    before = (await site.router.ask())["resident"]
    streams = await _opened(site, count)
    held = (await site.router.ask())["resident"] - before
    report.row("the router's process", {"what": "memory for a stream, KiB", "is": held / count / 1024})
    for stream in warm + streams:
        stream.abort()
    await asyncio.sleep(1)


async def _opened(site: _Site, count: int) -> list[Stream]:
    """So many streams, all of which have begun."""
    from aiokv.bench.routing import Stream, asked

    bodies = [asked(site.name(), stream=True, transfer=False) for _ in range(count)]
    streams = [await Stream.open(site.http, body, {}) for body in bodies]
    while not all(stream.first for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return streams


async def _aborts(site: _Site, report: Report, options: Options) -> None:
    """A client that goes away before the first token leaves both sides at it."""
    from aiokv.bench.routing import Stream, asked

    await site.tell(_PACED_TOKENS, 0.0, "hang")
    gone: dict[str, int] = {}
    for _ in range(20 if options.quick else 200):
        name = site.name()
        stream = await Stream.open(site.http, asked(name, stream=True, transfer=False), {})
        await asyncio.sleep(0.02)
        gone[name] = time.monotonic_ns()
        stream.abort()
    await asyncio.sleep(1 if options.quick else 2)
    sides = [(await side[0].ask("seen"))["seen"] for side in (site.prefills, site.decodes)]
    took, kept = _aborted(gone, sides)
    if kept or not took:
        raise RuntimeError(f"{kept} of {len(gone)} requests were not given up in time")
    report.row(
        "from the client's end to both sides' abort",
        {
            "clients": len(gone),
            "sent on before": len(took),
            "p50 ms": quantile(took, 0.5) * 1e3,
            "p99 ms": quantile(took, 0.99) * 1e3,
        },
    )
    report.ratio("router.abort_p99_s", [quantile(took, 0.99)])


def _aborted(gone: dict[str, int], sides: list[dict[str, tuple[int, int]]]) -> tuple[list[float], int]:
    """For each client that left, when the later side had given it up (s); and how many some side has kept.

    What was not sent on yet when the client left, no side has to give up.
    """
    found, kept = [], 0
    for name, at in gone.items():
        ended = [side[name][1] for side in sides if name in side]
        if not all(ended):
            kept += 1
        elif ended:
            found.append(max(ended) / 1e9 - at / 1e9)
    return sorted(found), kept


async def _killed(report: Report, options: Options) -> None:
    """From SIGKILL of a decode server to the last request that the router tried to send it."""
    failed, asked_after = 0, 0
    async with _site(2) as site:
        await site.tell(2, 0.0)
        load = _Load(site, direct=False)
        for _ in range(20):
            await load.one()
        site.decodes[0].signal(signal.SIGKILL)
        killed, last = time.monotonic(), 0.0
        until = killed + 3 * _INTERVAL + 1
        while time.monotonic() < until:
            broken = load.broken
            sent = time.monotonic()
            await load.one()
            asked_after += 1
            if load.broken > broken:
                failed, last = failed + 1, sent - killed
            await asyncio.sleep(0.005)
        up = (await site.router.ask())["up"]
    report.row(
        "a decode server is killed; time to live 1.5 s",
        {
            "requests after it": asked_after,
            "failed": failed,
            "last failed after s": last,
            "decode servers known at the end": up.count("decode"),
        },
    )


async def _run(report: Report, options: Options) -> None:
    async with _site(1) as site:
        await _held(site, report, options)  # first, since memory that was used once stays
        await site.tell(_PACED_TOKENS, _PACE)
        await _first_tokens(site, report, options)
        await _throughput(site, report, options)
        await _aborts(site, report, options)
    await _killed(report, options)


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
