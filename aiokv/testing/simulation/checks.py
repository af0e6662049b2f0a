"""What has to be true of a world once nothing goes on in it any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiokv.engine.core import Core
from aiokv.proto.parts import State
from aiokv.proto.session import Phase
from aiokv.proto.transfers import Part
from aiokv.testing.simulation.ledger import Blocks
from aiokv.testing.simulation.process import Process
from aiokv.testing.simulation.records import SLACK_NS, Record

if TYPE_CHECKING:
    from aiokv.testing.simulation.world import World

#: A device that takes so long for a step may not come to an end within the drain bound (s).
SLOW_S = 0.001

__all__ = ["closed", "ended", "going_on", "idle", "well"]


def idle(world: World) -> Iterator[str]:
    """What is wrong with a world in which no transfer goes on and nobody was closed yet."""
    for process in world.processes:
        if process.state == "up":
            yield from (f"{process.name} is idle, but {what}" for what in _busy(process))
        if process.state != "dead" and not process.loop.idle:
            yield f"{process.name} is idle, but has scheduled {process.loop.scheduled()}"


def _busy(process: Process) -> Iterator[str]:
    engine = process.engine
    counts = engine.statistics()
    if process.tasks:
        yield f"tasks go on: {process.tasks}"
    for name in ("offers", "fetches", "parts", "parked", "in_flight"):
        if getattr(counts, name):
            yield f"statistics.{name} is {getattr(counts, name)}"
    quarantined = sum(record.quarantined for record in process.world.records if record.process is process)
    if not counts.leases == counts.quarantined == quarantined:
        yield f"{counts.leases} leases are out, {counts.quarantined} quarantined, of {quarantined} transfers"
    if bool(counts.blocks_held) is not bool(quarantined):
        yield f"{counts.blocks_held} blocks are held for {quarantined} transfers in quarantine"
    core = engine._core
    if core is not None:
        yield from _leftovers(core)
    yield from _counted(process)


def _leftovers(core: Core) -> Iterator[str]:
    """What an engine's parts keep of transfers that are over."""
    table, mover, peers = core.table, core.mover, core.peers
    for what, things in (
        ("courses", core._courses),
        ("announced layers", core._announced),
        ("tasks", peers.tasks),
        ("actions", table.actions),
        ("transfers", table.ledger.transfers),
        ("parts", table.ledger.parts),
        ("parked requests", table.waiting._parked),
        ("parts with news", table.producer._news),
        ("movements", mover._movements),
        ("queued chunks", mover._scheduler._where),
        ("talking sessions", peers._talking),
        ("pending watches", [None] * core.poller.pending),
    ):
        if things:
            yield f"there are {what}: {things}"
    if mover._scheduler.in_flight or mover.in_flight:
        yield f"{mover._scheduler.in_flight} bytes of {mover.in_flight} chunks count as in flight"
    if table.next_timer() is not None or peers.next_timer() is not None:
        yield f"timers are set: {table.next_timer()}, {peers.next_timer()}"
    if len(table.ledger.tombstones) > core.settings.tombstones:
        yield f"there are {len(table.ledger.tombstones)} tombstones"
    lost = [flow for flow in mover._flows.values() if flow.link.lost]
    if lost:
        yield f"there are flows of links that are gone: {lost}"
    for session in peers.sessions:
        if session.live or session.wants_to_send:
            yield f"{session} carries {session.live} parts"


def _counted(process: Process) -> Iterator[str]:
    """Whether the statistics say what happened."""
    counts = process.engine.statistics()
    parts = list(_parts(process))
    for state in (State.LANDED, State.FAILED, State.ABORTED):
        found = sum(part.state is state for part in parts)
        if counts.parts_ended[state.value] != found:
            yield f"{counts.parts_ended[state.value]} parts {state.value} are counted, there were {found}"
    fetched = [record.handle for record in _records(process) if not record.offers]
    moved = sum(handle.progress.bytes_moved for handle in fetched)
    if moved != counts.bytes_received:
        yield f"statistics count {counts.bytes_received} bytes received, transfers {moved}"
    for handle in fetched:
        progress = handle.progress
        if handle.error is None and progress.bytes_moved != progress.bytes_total:
            yield f"{handle!r} ended well with {progress.bytes_moved} of {progress.bytes_total} bytes"


def _records(process: Process) -> Iterator[Record]:
    return (each for each in process.world.records if each.process is process and each.begun_at)


def _parts(process: Process) -> Iterator[Part]:
    for record in _records(process):
        yield from record.handle._transfer.parts


def going_on(world: World) -> Iterator[str]:
    """What is wrong with a world in the middle of it all."""
    for process in world.processes:
        core = process.engine._core
        if process.state not in ("up", "closing") or process.loop.frozen or core is None:
            continue
        # Before a turn that was asked for, what it does is still to be done.
        if core._turn_wanted:
            continue
        for part in core.table.ledger.parts.values():
            over = part.session is None or part.session.phase is Phase.ENDED
            if over and part.state is not State.DRAINING:
                yield f"{process.name}: {part} goes on over {part.session}"
        if core.leases.out != len(core._courses) + len(core._quarantined):
            yield f"{process.name}: {core.leases.out} leases are out for {len(core._courses)} transfers"
        flying = [movement.in_flight for movement in core.mover._movements.values()]
        if sum(flying) > core.mover.in_flight or min(flying, default=0) < 0:
            yield f"{process.name}: {core.mover.in_flight} chunks in flight, of movements {flying}"
        most = core.settings.parked_per_peer
        waiting = core.table.waiting
        parked = Counter(each.session for listed in waiting._parked.values() for each in listed)
        if len(waiting) != parked.total():
            yield f"{process.name}: {len(waiting)} requests are said to be parked, of {parked.total()}"
        for session, count in parked.items():
            if count != session.parked or count > most:
                known = f"{session.parked} known of, {most} at most"
                yield f"{process.name}: {count} requests of {session} are parked ({known})"
            if session.phase is Phase.ENDED:
                yield f"{process.name}: requests of {session} are still parked"


def ended(world: World) -> Iterator[str]:
    """What is wrong with how transfers ended, the two sides of each compared."""
    for record in world.records:
        process = record.process
        slow = process.stalled or process.broken or process.rank.step_s >= SLOW_S
        if record.quarantined and not slow:
            yield f"{record} never became quiet, though the device worked"
    by_incarnation = {process.incarnation: process for process in world.past if process.incarnation}
    consumers: dict[tuple[object, ...], list[Part]] = {}
    for process in world.past:
        for part in _parts(process):
            if not part.ended and process.state != "dead":
                yield f"{process.name}: {part} never ended"
            peer = by_incarnation.get(part.session.incarnation) if part.session is not None else None
            if part.role == "consumer":
                consumers.setdefault((process, peer, *part.transfer.key), []).append(part)
            if peer is not None and peer.killed_at and process.state != "dead":
                yield from _soon(process, part, max(peer.killed_at, _begun(process, part)), "its peer died")
    for process in world.past:
        for part in _parts(process):
            if part.role == "producer" and part.session is not None:
                peer = by_incarnation.get(part.session.incarnation)
                found = consumers.get((peer, process, *part.transfer.key), [])
                yield from _matched(process, part, peer, found)


def _matched(process: Process, part: Part, peer: Process | None, others: list[Part]) -> Iterator[str]:
    """A producer's part and what the consumer made of it."""
    if part.state is State.LANDED and not any(other.state is State.LANDED for other in others):
        states = [other.state.value for other in others]
        yield f"{process.name}: {part}, but at {peer and peer.name} it is {states}"
    for other in others:
        if part.accepted and other.accepted and peer is not None and process.ended_at.get(part):
            if process.state != "dead" and peer.ended_at.get(other):
                yield from _soon(process, part, peer.ended_at[other], f"it ended at {peer.name}")
            if peer.state != "dead":
                yield from _soon(peer, other, process.ended_at[part], f"it ended at {process.name}")


def _soon(process: Process, part: Part, since: int, what: str) -> Iterator[str]:
    """A part ends within the bounds of liveness and drain, once it can't go on."""
    world, ended = process.world, process.ended_at.get(part)
    if ended is None:
        return
    settings = world.scenario.settings
    bound = settings.liveness_ns + settings.heartbeat_ns + settings.drain_ns + 2 * SLACK_NS
    lost = world.time_suspended(process, since, ended)
    if lost:
        bound += lost + settings.liveness_ns  # whose silence was one's own fault is given more time
    if ended > since + bound:
        yield f"{process.name}: {part} went on for {(ended - since) / 1e9:.3f} s after {what}"


def _begun(process: Process, part: Part) -> int:
    return next(each.begun_at for each in _records(process) if each.handle._transfer is part.transfer)


def well(world: World) -> Iterator[str]:
    """What failed although nothing was wrong."""
    if world.scenario.calm and world.scenario.settings.parked_per_peer > len(world.scenario.requests):
        for record in world.records:
            if not (record.request.odd or record.landed or record.request.tid in world.left_out):
                yield f"{record} should have ended well, but: {record.handle.error or record.error!r}"


def _quarantined(process: Process) -> list[Blocks]:
    """Blocks that were given up: something may still have written to them."""
    return [
        tuple(tuple(listed.ids.tolist()) for listed in record.handle._transfer.blocks)
        for record in _records(process)
        if record.quarantined
    ]


def closed(world: World) -> Iterator[str]:
    """What is wrong with a world in which all engines were closed."""
    for process in world.past:
        if process.state == "dead":
            continue
        if process.state != "closed":
            yield f"{process.name} is {process.state}, not closed"
        left = [task for task in asyncio.all_tasks(process.loop) if not task.done()]
        if left:
            yield f"{process.name} was closed, but left tasks: {left}"
        if not process.loop.idle:
            yield f"{process.name} was closed, but has scheduled {process.loop.scheduled()}"
        if process.links:
            yield f"{process.name} was closed, but has links"
        if not process.broken and (wrong := process.ledger.wrong(_quarantined(process))):
            yield f"{process.name}: {wrong}"
    if world.network.bound:
        yield f"addresses are still bound: {world.network.bound}"
    if world.hub._transports or world.senders:
        yield f"transports are still known: {world.hub._transports}, {world.senders}"
