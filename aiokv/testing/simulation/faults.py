"""What the world does to simulated engines, and how it makes up for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.testing.faultynetwork import Faults
from aiokv.testing.simulation.process import Process
from aiokv.testing.simulation.scenario import Fault

if TYPE_CHECKING:
    from aiokv.testing.simulation.world import World

__all__ = ["begin", "heal_all", "restart"]


def begin(world: World, fault: Fault) -> None:
    """Have a fault happen now, and end when it is over."""
    process = world.processes[fault.rank]
    here, there = (world.scenario.ranks[number].address for number in (fault.rank, fault.other))
    later = world.later
    match fault.kind:
        case "freeze":
            process.freeze()
            later(fault.lasts, process.thaw)
        case "jump":
            world.jump(fault.lasts)
        case "kill" | "close":
            if fault.kind == "kill":
                process.kill(keep=fault.flag)
            else:
                process.close()
            if fault.lasts:
                later(fault.lasts, restart, world, process)
        case "cut":
            world.note("world", f"{here} to {there} is cut{' both ways' if fault.flag else ''}")
            world.network.cut(here, there, both_ways=fault.flag, hold=fault.second_flag)
            later(fault.lasts, world.network.heal, here, there)
        case "cut off":
            world.note("world", f"{here} is cut off")
            world.network.cut(here, None, both_ways=fault.flag, hold=fault.second_flag)
            later(fault.lasts, world.network.heal, here, None)
        case "noise":
            world.note("world", f"{here} sends through {fault.noise}")
            world.network.set_faults(fault.noise, here)
            later(fault.lasts, world.network.set_faults, world.scenario.channel, here)
        case _:
            _data_plane(world, fault, process)


def _data_plane(world: World, fault: Fault, process: Process) -> None:
    match fault.kind:
        case "unlink":
            if process.alive and process.cut_link():
                world.note(process.name, "loses a link")
        case "stall device":
            world.note(process.name, "has its device stalled")
            process.device.pause()
            process.stalled = True
            world.later(fault.lasts, resume, process)
        case "fail device":
            busy = [stream for stream in process.device._busy if stream.queued]
            if busy and process.alive:
                stream = world.rng.choice(busy)
                world.note(process.name, f"has {stream} fail")
                process.broken = True
                process.device.fail(stream, "by the simulation")


def resume(process: Process) -> None:
    """Let a device take steps again, unless its process is gone."""
    if process.state != "dead":
        process.world.note(process.name, "has its device go on")
        process.device.resume()


def restart(world: World, old: Process) -> None:
    """Start a process again at the address of one that is gone, once it is."""
    number = old.rank.number
    if world.processes[number] is not old or world.ending:
        return
    if old.alive:
        world.later(0.05, restart, world, old)
        return
    life = sum(process.rank.number == number for process in world.past)
    process = Process(world, old.rank, life)
    world.note(process.name, f"starts as life {life}")
    world.processes[number] = process
    world.past.append(process)


def heal_all(world: World) -> None:
    """Undo everything that can be undone."""
    world.note("world", "everything is healed")
    world.forget_timers()
    world.network.heal()
    for rank in world.scenario.ranks:
        world.network.set_faults(Faults(), rank.address)
    world.network.set_faults(Faults())
    for process in world.processes:
        process.thaw()
    for process in world.past:
        if process.state != "dead":
            process.device.resume()
