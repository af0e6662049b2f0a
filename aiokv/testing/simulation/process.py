"""One simulated process: a real engine on a loop, a device and a cache of its own, all of which can die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from aiokv.device.cache import KVCache
from aiokv.device.hazards import Hazard
from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.parts import State
from aiokv.proto.transfers import ActionKind, Part
from aiokv.testing.simulation.ledger import Ledger
from aiokv.testing.simulation.scenario import Rank
from aiokv.testing.simulation.sending import SendingTransport
from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.base import Link, PeerInfo, Transport
from aiokv.transports.memory import MemoryTransport

if TYPE_CHECKING:
    from aiokv.testing.simulation.world import World

__all__ = ["Process", "SimulatedDevice", "SimulatedTransport"]


class SimulatedDevice(MockedDevice):
    """Steps itself on the world's loop, since a GPU goes on while its process is frozen."""

    def __init__(self, world: World, name: str, step_s: float) -> None:
        # MockedDevice makes a stream in its constructor, which notes nothing.
        self._world = world
        self._step_s = step_s
        super().__init__(world.rng.getrandbits(32), name=name)
        self.resume()

    def note(self, found: list[Hazard]) -> None:
        """Hazards go to the world, which knows whether one may be."""
        for hazard in found:
            self._world.hazard(hazard)

    def pause(self) -> None:
        """Take no more steps for now."""
        if self._autostep is not None:
            self._autostep.close()

    def resume(self) -> None:
        """Take steps again."""
        self.autostep(self._world.loop, random.Random(self.seed), self._step_s)  # noqa: S311

    def synchronize(self) -> None:
        """The host waits for all that it enqueued, as one does before memory is freed."""
        if self.idle:
            for stream in self._handles.values():
                stream.record()
            self.run()
            for stream in self._handles.values():
                stream.timeline.confirmed = stream.timeline.clock[stream.timeline]

    def die(self) -> None:
        """The process that used it is dead: nothing of what was queued happens any more."""
        self.pause()
        for stream in [*self._handles.values(), *self._busy]:
            stream._queue.clear()
            stream.timeline.confirmed = 1 << 62
        self._busy.clear()


class SimulatedTransport(MemoryTransport):
    """The memory transport between processes: each end lives on the loop of its own process."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.world.hub)
        self._process = process

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """Takes a while, and as long as the producer is frozen."""
        world = self._process.world
        await asyncio.sleep(world.rng.choice((0.0, 0.0001, 0.01)))
        if len(world.scenario.transports) > 1 and world.rng.random() < 0.5:
            raise PeerLostError("not this time")
        producer = self._hub.find(description)
        while isinstance(producer, SimulatedTransport) and producer._process.loop.frozen:
            await asyncio.sleep(0.01)
            producer = self._hub.find(description)
        return await super().connect(description, peer)

    def admit(self, reader: Any) -> Any:  # noqa: ANN401 - ends are private to the memory transport
        """The producer's end belongs to the producer's loop."""
        return self._process.loop.within(super().admit, reader)

    async def start(self, cache: KVCache, host: str) -> None:
        """As a real one: not at once."""
        await asyncio.sleep(0)
        await super().start(cache, host)

    def cut(self) -> bool:
        """Lose one link that this engine reads through; False if there is none."""
        for end in self._reading.values():
            if not end.lost:
                end.producer_gone("cut by the simulation")
                return True
        return False


class Process:
    """An engine's process, from its start until it is closed or killed.

    Args:
        world: Where it lives.
        rank: Which engine it runs.
        life: How many there were before it at this address.

    Attributes:
        state: "starting", "up", "closing", "closed" or "dead".
        suspended: When it could not run: half-open ranges of nanoseconds, the last one perhaps still open.
        expired: A reader's lease on its blocks ended before the reader said that it reads no more.
        stalled: Its device stood still for a while, so that blocks may never have become quiet.
        incarnation: The engine's; empty before it was up.
        ended_at: When each part ended (ns).
        killed_at: When it was killed (ns); 0 if it wasn't.
        broken: A stream of its device failed, so that it may go on failing.
    """

    def __init__(self, world: World, rank: Rank, life: int) -> None:
        self.world = world
        self.rank = rank
        self.name = f"e{rank.number}" + (f".{life}" if life else "")
        self.loop = VirtualLoop(world.time, self.name)
        self.loop.set_exception_handler(self._on_error)
        self.device = SimulatedDevice(world, self.name, rank.step_s)
        self.cache = KVCache.allocate(rank.layout if not life else rank.next_layout, device=self.device)
        self.ledger = Ledger(self.cache, random.Random(f"{world.scenario.seed}/{self.name}"))  # noqa: S311
        self.reading = SimulatedTransport(self)
        self.sending = SendingTransport(self)
        transports: dict[str, Transport] = {"memory": self.reading, "sent": self.sending}
        self.engine = TransferEngine(
            self.cache,
            transports=[transports[name] for name in world.scenario.transports],
            settings=world.scenario.settings,
            channel=world.network.channel(rank.address),
            clock=world.time.clock,
        )
        self.state = "starting"
        self.tasks: set[asyncio.Task[None]] = set()
        self.expired = False
        self.broken = False
        self.stalled = False
        self.incarnation = b""
        self.ended_at: dict[Part, int] = {}
        self.killed_at = 0
        self._stop = self.loop.create_future()
        self.main = self.loop.create_task(self._run(), name=f"{self.name} main")

    def __repr__(self) -> str:
        return f"<{self.name} {self.state}>"

    @property
    def alive(self) -> bool:
        """Neither closed nor killed."""
        return self.state in ("starting", "up", "closing")

    async def _run(self) -> None:
        try:
            async with self.engine:
                self._watch_parts()
                if self.state == "starting":
                    self.state = "up"
                self.world.poke()
                await self._stop
        except OSError as error:
            self.world.fail(f"{self.name} could not start: {error}")
        self.state = "closed"
        self.world.poke()

    def _watch_parts(self) -> None:
        """Take down when parts end, which nobody else does."""
        core = self.engine._core
        if core is None:
            raise RuntimeError("an engine that was entered has a core")
        self.incarnation = core.peers._me.incarnation
        ledger, ended_at, time = core.table.ledger, self.ended_at, self.world.time
        act = ledger.act

        def watched(kind: ActionKind, part: Part, mask: int = 0) -> None:
            if kind is ActionKind.ENDED:
                ended_at[part] = time.now
                self._check_promise(part)
            act(kind, part, mask)

        ledger.act = watched  # type: ignore[method-assign]

    def _check_promise(self, mine: Part) -> None:
        """When a producer's part ends, its reader reads no more, or may not believe what it reads."""
        session = mine.session
        if (
            mine.role == "consumer"
            or not mine.accepted
            or not mine.one_sided
            or session is None
            or not session.incarnation
        ):
            return
        if isinstance(mine.life.error, DeviceError):
            return  # in quarantine: the blocks are not given back
        for reader in self.world.past:
            if reader.state != "dead" and reader.incarnation == session.incarnation:
                core = reader.engine._core
                for part in core.table.ledger.parts.values() if core is not None else ():
                    theirs = part.session
                    if theirs is None or theirs.incarnation != self.incarnation:
                        continue
                    same = part.transfer.key == mine.transfer.key and part.role == "consumer"
                    if part.life.outcome not in (None, State.LANDED):
                        continue  # it has given up, so it believes nothing
                    if same and part.ready and theirs.lease_held > self.world.time.now:
                        left = (theirs.lease_held - self.world.time.now) / 1e9
                        self.world.fail(
                            f"{self.name}: {mine} ended, {part} holds a lease for {left:.3f} s more"
                        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a user's task in this process."""
        task = self.loop.create_task(work, name=f"{self.name} {name}")
        self.tasks.add(task)
        self.world.users.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.world.users.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(f"{task.get_name()}: {type(error).__name__}: {error}", error)
        self.world.poke()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.world.fail(f"{self.name}: {context['message']}: {error!r}", error)

    # -- what is done to it

    def close(self) -> None:
        """Have it leave its engine, with whatever is going on."""
        if self.state == "up":
            self.state = "closing"
            self.world.note(self.name, "closes")
            self.loop.call_soon(self._stop.set_result, None)

    def cut_link(self) -> bool:
        """Lose one link that it reads or receives by; False if there is none."""
        return self.loop.within(self.reading.cut) or self.loop.within(self.sending.cut)

    @property
    def links(self) -> int:
        """Links that are open."""
        return len(self.reading._served) + len(self.reading._reading) + self.sending.links

    def freeze(self) -> None:
        """As SIGSTOP."""
        if self.alive and not self.loop.frozen:
            self.world.note(self.name, "is frozen")
            self.loop.frozen = True
            self.world.suspended(self, begins=True)

    def thaw(self) -> None:
        """As SIGCONT."""
        if self.loop.frozen:
            self.world.note(self.name, "is thawed")
            self.loop.frozen = False
            self.world.suspended(self, begins=False)

    def kill(self, *, keep: bool) -> None:
        """As SIGKILL; ``keep``: frames under way to it reach whoever binds its address next."""
        if not self.alive:
            return
        self.world.note(self.name, "is killed")
        self.state = "dead"
        self.killed_at = self.world.time.now
        self.loop.kill()
        try:
            self.world.network.kill(self.rank.address, keep=keep)
        except ValueError:
            self.world.note(self.name, "was not bound")
        self.world.hub.kill(self.reading)
        self.sending.die()
        self.device.die()
        self.world.users -= self.tasks
        self.world.poke()

    def dispose(self) -> None:
        """The world ends."""
        self.device.pause()
        self.loop.close()
