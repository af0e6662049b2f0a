"""What has to be true of a world once nothing goes on in it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiokv.engine.core import Core
from aiokv.proto.parts import State
from aiokv.proto.transfers import Part
from aiokv.testing.simulation.ledger import Blocks
from aiokv.testing.simulation.process import Process

if TYPE_CHECKING:
    from aiokv.testing.simulation.world import World

__all__ = ["closed", "ended", "idle"]


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
        yield f"{counts.leases} leases are out, {counts.quarantined} in quarantine, of {quarantined} transfers"
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
        ("handles", core._handles),
        ("held leases", core._held),
        ("unsure transfers", core._unsure),
        ("points to wait for", core._after),
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
    links = {id(peer.link) for peer in peers._peers.values() if peer.link is not None}
    if set(mover._flows) - links:
        yield f"there are flows of links that are gone: {mover._flows}"
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
            yield f"statistics count {counts.parts_ended[state.value]} parts {state.value}, there were {found}"
    fetched = [record.handle for record in _records(process) if not record.offers]
    moved = sum(handle.bytes_moved for handle in fetched)
    if moved != counts.bytes_received:
        yield f"statistics count {counts.bytes_received} bytes received, transfers {moved}"
    for handle in fetched:
        if handle.error is None and handle.bytes_moved != handle.bytes_total:
            yield f"{handle!r} ended well with {handle.bytes_moved} of {handle.bytes_total} bytes"


def _records(process: Process) -> Iterator:  # type: ignore[type-arg]
    return (each for each in process.world.records if each.process is process and each.begun_at)


def _parts(process: Process) -> Iterator[Part]:
    for record in _records(process):
        yield from record.handle.transfer.parts


def ended(world: World) -> Iterator[str]:
    """What is wrong with how transfers ended, the two sides of each compared."""
    incarnations = {
        process.engine._core.peers._me.incarnation: process
        for process in world.past
        if process.engine._core is not None
    }
    consumers: dict[tuple[object, ...], list[State]] = {}
    for record in world.records:
        if record.quarantined and not (record.process.stalled or record.process.broken):
            yield f"{record} never became quiet, though the device worked"
    for process in world.past:
        for part in _parts(process):
            if part.state not in (State.LANDED, State.FAILED, State.ABORTED) and process.state != "dead":
                yield f"{process.name}: {part} never ended"
            if part.role == "consumer" and part.session is not None:
                peer = incarnations.get(part.session.incarnation)
                consumers.setdefault((process, peer, *part.transfer.key), []).append(part.state)
    for process in world.past:
        for part in _parts(process):
            if part.role == "producer" and part.state is State.LANDED and part.session is not None:
                peer = incarnations.get(part.session.incarnation)
                found = consumers.get((peer, process, *part.transfer.key), [])
                if State.LANDED not in found:
                    states = [state.value for state in found]
                    yield f"{process.name}: {part}, but at {peer and peer.name} it is {states}"


def well(world: World) -> Iterator[str]:
    """What failed although nothing was wrong."""
    if world.scenario.calm and world.scenario.settings.parked_per_peer > len(world.scenario.requests):
        for record in world.records:
            if not record.request.odd and not record.landed:
                yield f"{record} should have ended well, but: {record.handle.error or record.error!r}"


def _quarantined(process: Process) -> list[Blocks]:
    """Blocks that were given up: something may still have written to them."""
    return [
        tuple(tuple(listed.ids.tolist()) for listed in record.handle.transfer.blocks)
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
        if process.transport._served or process.transport._reading:
            yield f"{process.name} was closed, but has links"
        if not process.broken and (wrong := process.ledger.wrong(_quarantined(process))):
            yield f"{process.name}: {wrong}"
    if world.network.bound:
        yield f"addresses are still bound: {world.network.bound}"
    if world.hub._transports:
        yield f"the hub still knows {world.hub._transports}"
