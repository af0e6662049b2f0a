"""The simulated control plane: faults of its own, and a life that doesn't depend on any process's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.control.memory import MemoryPort
from aiokv.proto.messages import Frame, decode_frame, decode_messages
from aiokv.testing.faultynetwork import Faults, FaultyNetwork

if TYPE_CHECKING:
    from aiokv.testing.simulation.world import World

__all__ = ["SimulatedNetwork"]


class SimulatedNetwork(FaultyNetwork):
    """What is under way stays under way, whether its sender is frozen or dead."""

    def __init__(self, world: World, faults: Faults) -> None:
        super().__init__(int.from_bytes(world.rng.randbytes(4), "big"), faults)
        self._world = world

    def carry(self, port: MemoryPort, frame: bytes) -> None:
        """Bring a frame, by timers of the world's loop and not of the sender's."""
        if self._world.verbose:
            self._world.note(port.owner.address, f"to {port.target}: {_words(decode_frame(frame))}")
        self._world.loop.within(super().carry, port, frame)

    @property
    def bound(self) -> list[str]:
        """Addresses that somebody is at."""
        return sorted(self._bound)


def _words(frame: Frame) -> str:
    """A frame in a line."""
    texts = []
    for message in decode_messages(frame):
        name = type(message).__name__.upper()
        parts = [
            f"{field}={value}"
            for field in ("tid", "attempt", "role", "reason", "text", "ready", "lease", "stream", "tokens")
            if (value := getattr(message, field, None)) not in (None, "", 0)
        ]
        texts.append(f"{name} {' '.join(parts)}".strip())
    return f"[{frame.mine}>{frame.yours} #{frame.seq} ack {frame.ack}] {'; '.join(texts) or 'nothing'}"
