"""Plays a scenario from its beginning to an empty world, and says what was wrong."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aiokv.proto.settings import SECOND
from aiokv.testing.simulation import checks, faults, users
from aiokv.testing.simulation.drawing import Mood, draw, plain_request
from aiokv.testing.simulation.records import SLACK_NS, Record
from aiokv.testing.simulation.scenario import OfferPlan, Request, Scenario, Side
from aiokv.testing.simulation.world import Errors, World
from aiokv.testing.virtual import Deadlock, Livelock, describe_tasks

if TYPE_CHECKING:
    from aiokv.testing.simulation.process import Process

__all__ = ["Report", "play", "run_seed"]

#: Attempts at a transfer in a healed world. The first finds out what was lost meanwhile.
ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one scenario.

    Attributes:
        failures: What is wrong; empty if nothing is.
        trace: What happened, line by line.
        turns: Turns of all loops.
        counts: Transfers by how they ended, and what else is worth counting.
    """

    scenario: Scenario
    failures: list[str]
    error: BaseException | None
    trace: list[str]
    turns: int
    counts: dict[str, int] = field(default_factory=dict)


def run_seed(seed: int | str, *, mood: Mood | None = None, verbose: bool = False) -> Report:
    """Draw the scenario of a seed and play it."""
    return play(draw(seed, mood), verbose=verbose)


def play(scenario: Scenario, *, verbose: bool = False) -> Report:
    """Play a scenario.

    Args:
        scenario: What shall happen.
        verbose: Put control messages into the trace, too.
    """
    world = World(scenario, verbose=verbose)
    errors = Errors(world)
    loggers = [logging.getLogger(name) for name in ("aiokv", "asyncio")]
    for logger in loggers:
        logger.addHandler(errors)
    try:
        _play(world)
    except (Deadlock, Livelock) as error:
        world.fail(f"{type(error).__name__}: {error}", error)
    finally:
        world.dispose()
        for logger in loggers:
            logger.removeHandler(errors)
    trace = world.story() if world.failures or verbose else []
    return Report(scenario, world.failures, world.error, trace, world.time.turns, _counts(world))


def _play(world: World) -> None:
    world.run(_scenario(world))
    if not world.failures and not world.settle(120):
        scheduled = [line for loop in world.time.loops for line in loop.scheduled()]
        world.fail(f"nothing goes on, but the loops don't become idle: {scheduled}")
    _check(world, checks.idle(world))
    if not world.failures:
        world.run(_close(world))
        if not world.failures and not world.settle(10):
            world.fail("everything is closed, but the loops don't become idle")
    _check(world, checks.ended(world))
    _check(world, checks.well(world))
    _check(world, checks.closed(world))
    if not world.failures:
        for process in world.past:
            world.excuse_frees = process.expired
            if process.state == "closed":
                process.ledger.look()
                process.device.synchronize()
                if not any(each.quarantined for each in world.records if each.process is process):
                    process.cache.close()  # else it is kept for good


def _check(world: World, found: Iterable[str]) -> None:
    if not world.failures:
        for what in found:
            world.fail(what)


# -- the scenario


async def _scenario(world: World) -> None:
    await _until(world, lambda: all(p.state != "starting" for p in world.processes), 5, "engines start")
    world.note("world", "all engines are up")
    for request in world.scenario.requests:
        ask(world, request, 0.0)
    for fault in world.scenario.faults:
        world.later(fault.at, faults.begin, world, fault)
    sampling = world.loop.create_task(_sample(world), name="samples")
    last = max((fault.at + fault.lasts for fault in world.scenario.faults), default=0.0)
    await _until(world, lambda: not world.users and world.asked == 0, _end(world), "transfers end")
    if world.rng.random() < 0.5 and last:
        await asyncio.sleep(min(last, 1.0))
    sampling.cancel()
    await _heal(world)


async def _sample(world: World) -> None:
    """Look, again and again, for what must not be at any time."""
    while True:
        await asyncio.sleep(world.rng.choice((0.05, 0.3, 1.0)))
        _check(world, checks.going_on(world))


def _end(world: World) -> float:
    """Seconds by which every transfer has ended, with attempts, and lost time."""
    sides = [side for request in world.scenario.requests for side in request.sides]
    lost = sum(fault.lasts for fault in world.scenario.faults) + 1.0
    return 3 * (max((side.start + side.deadline for side in sides), default=0.0) + lost) + 30


async def _until(world: World, reached, limit_s: float, what: str) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    if not await world.until(reached, limit_s):
        going = [record for record in world.records if record.begun_at and not record.over_at]
        lines = [f"{record}: {record.handle!r}" for record in going if record.process.alive]
        lines += [line for process in world.processes for line in describe_tasks(process.loop)]
        world.fail(f"hang: not all {what} within {limit_s:.0f} s\n" + "\n".join(lines))


def ask(world: World, request: Request, delay: float) -> None:
    """Have all who take part in a request begin, each at its time."""
    for plan in request.sides:
        world.asked += 1
        world.loop.call_later(delay + plan.start, _begin, world, request, plan)


def _begin(world: World, request: Request, plan: Side) -> None:
    world.asked -= 1
    world.poke()
    process = world.processes[plan.rank]
    if process.state != "up":
        world.leave_out(process, request, f"it is {process.state}")
        return
    verb = "offers" if isinstance(plan, OfferPlan) else "fetches"
    task = process.spawn(_side(world, process, request, plan), f"{verb} {request.tid}")
    for delay in plan.cancels:
        world.loop.call_later(delay, process.loop.call_soon, _cancel, world, task)


async def _side(world: World, process: Process, request: Request, plan: Side) -> None:
    if isinstance(plan, OfferPlan):
        await users.offer(process, request, plan)
    else:
        await users.fetch(process, request, plan)
    mine = [r for r in world.records if r.task is asyncio.current_task()]
    if request.retry and not world.ending and any(r.begun_at and not r.landed for r in mine):
        process.loop.call_soon(_retry, world, request)


def _retry(world: World, request: Request) -> None:
    """As a router does: another attempt, by all who take part, once."""
    key = (request.tid, request.attempt + 1)
    if key in world.attempts or request.attempt >= 2 or world.ending:
        return
    world.attempts.add(key)
    again = replace(
        request,
        attempt=request.attempt + 1,
        offers=tuple(replace(plan, start=0.0, cancels=(), timeout=0.0, raises=-1) for plan in request.offers),
        fetches=tuple(
            replace(plan, start=0.0, cancels=(), timeout=0.0, raises=-1) for plan in request.fetches
        ),
    )
    world.note("router", f"tries {request.tid} again")
    world.loop.within(ask, world, again, 0.001)


def _cancel(world: World, task: asyncio.Task[None]) -> None:
    record = next((r for r in world.records if r.task is task), None)
    if record is None or not record.over_at:
        if record is not None:
            record.settled()
        world.note(task.get_name(), "is cancelled")
        task.cancel()


# -- a healed world


async def _heal(world: World) -> None:
    """Whatever happened before, a healed world works: transfers between any two that fit end well."""
    world.ending = True
    faults.heal_all(world)
    await _until(
        world,
        lambda: all(p.state in ("up", "closed", "dead") for p in world.processes),
        10,
        "engines start or close",
    )
    rng = random.Random(f"health {world.scenario.seed}")  # noqa: S311
    for process in world.processes:
        if not process.alive and rng.random() < 0.5:
            world.ending = False
            faults.restart(world, process)
            world.ending = True
    await _until(world, lambda: all(p.state != "starting" for p in world.processes), 5, "engines start")
    for process in list(world.processes):
        if process.state == "up" and process.rank.consumes and not process.broken:
            await _healthy(world, process, rng)


async def _healthy(world: World, consumer: Process, rng: random.Random) -> None:
    fit = tuple(
        process.rank
        for process in world.processes
        if process.state == "up"
        and not process.broken
        and process.cache.layout.model == consumer.cache.layout.model
    )
    errors: list[str] = []
    for attempt in range(ATTEMPTS):
        tid = f"health{consumer.rank.number}"
        request = plain_request(fit, consumer.rank, tid, rng.randint(1, 9), rng)
        if request is None:
            return
        request = replace(request, attempt=attempt, odd=True)
        ask(world, request, 0.0)
        await _until(world, lambda: not world.users and world.asked == 0, 60, "transfers end")
        mine = [r for r in world.records if r.request.tid == tid and r.request.attempt == attempt]
        if all(record.landed for record in mine):
            return
        world.note("world", f"attempt {attempt} at a transfer to {consumer.name} failed")
        errors = [f"{record}: {record.handle.error or record.error!r}" for record in mine]
    world.fail(f"a healed world doesn't work: {errors}")


# -- the end


async def _close(world: World) -> None:
    begun = world.time.now
    living = [process for process in world.processes if process.alive]
    world.rng.shuffle(living)
    for process in living:
        process.close()
        if world.rng.random() < 0.3:
            await world.until(lambda process=process: process.state == "closed", 20)  # type: ignore[misc]
    settings = world.scenario.settings
    await _until(world, lambda: not any(p.alive for p in world.processes), 60, "engines close")
    bound = len(living) * (settings.close_ns + settings.drain_ns + SLACK_NS)
    if world.time.now - begun > bound:
        world.fail(f"closing took {(world.time.now - begun) / SECOND:.3f} s")


def _counts(world: World) -> dict[str, int]:
    counts = {"hazards excused": world.hazards_excused, "seconds": int((world.time.now - 10**12) / 1e9)}
    for record in world.records:
        key = _outcome(record)
        counts[key] = counts.get(key, 0) + 1
    return counts


def _outcome(record: Record) -> str:
    if not record.begun_at:
        return "never began"
    if not record.over_at:
        return "died with its process"
    return "landed" if record.landed else type(record.handle.error).__name__
