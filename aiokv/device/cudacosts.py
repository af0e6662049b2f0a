"""What copies between a GPU and the host cost on this machine, by each way of doing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["DIRECTIONS", "PATHS", "TYPICAL", "CopyCosts", "Cost"]

#: ``plain``: one DMA a fragment; ``batch``: all in one call; ``staged``: gathered on the GPU and sent by
#: one DMA a staging chunk, or the mirror image; ``kernel``: a kernel that reaches through PCIe.
PATHS = ("plain", "batch", "staged", "kernel")
DIRECTIONS = ("to_host", "to_device")


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one way of copying, in nanoseconds: that passes, and that it holds the loop for, in sum.

    Attributes:
        start: Of any copy.
        fragment: Of each fragment more.
        byte: Of each byte.
    """

    start: float
    fragment: float
    byte: float

    def of(self, fragments: int, nbytes: int) -> float:
        """The expected cost of a copy."""
        return self.start + fragments * self.fragment + nbytes * self.byte

    @classmethod
    def fitted(cls, samples: Iterable[tuple[int, int, float]]) -> Cost:
        """What fits samples of (fragments, bytes, nanoseconds) best, in proportion to each."""
        rows = [(1.0, float(fragments), float(nbytes), taken) for fragments, nbytes, taken in samples]
        table = np.array(rows)
        table /= table[:, 3:]
        kept = [0, 1, 2]
        found = np.zeros(3)
        while kept:
            found[:] = 0
            found[kept] = np.linalg.lstsq(table[:, kept], table[:, 3], rcond=None)[0]
            if (found >= 0).all():
                break
            kept.remove(int(found.argmin()))
        return cls(*found.tolist())


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What each way of copying costs; ``print`` shows it.

    Attributes:
        to_host: Costs by the name of the way, from a GPU to pinned memory.
        to_device: The same from pinned memory to a GPU.
        kernel_weight: How much worse time of the GPU's multiprocessors is than time of its copy
            engines, since the model needs them: factor for each byte that a kernel takes through PCIe.
    """

    to_host: Mapping[str, Cost]
    to_device: Mapping[str, Cost]
    kernel_weight: float = 2.0

    def best(
        self, direction: str, fragments: int, host_fragments: int, nbytes: int, allowed: set[str]
    ) -> str:
        """The cheapest way to copy.

        Args:
            direction: One of ``DIRECTIONS``.
            fragments: Ranges that are contiguous at both ends.
            host_fragments: Ranges that are contiguous at the host.
            nbytes: Of all.
            allowed: The ways that can be gone.
        """
        table: Mapping[str, Cost] = getattr(self, direction)
        found, least = "kernel", float("inf")
        for path, cost in table.items():
            if path not in allowed:
                continue
            expected = cost.of(fragments, nbytes)
            if path == "staged" and host_fragments > 1:
                # One DMA more for each range at the host.
                expected += (host_fragments - 1) * table["plain"].fragment if "plain" in table else 0.0
            if path == "kernel":
                expected += nbytes * cost.byte * (self.kernel_weight - 1)
            if expected < least:
                found, least = path, expected
        return found

    def __str__(self) -> str:
        lines = [f"{'':22}{'us a copy':>12}{'us a fragment':>15}{'GB/s':>8}"]
        for direction in DIRECTIONS:
            for path, cost in getattr(self, direction).items():
                rate = f"{1 / cost.byte:.1f}" if cost.byte > 0 else "-"
                what = f"{direction} {path}"
                lines.append(f"{what:22}{cost.start / 1e3:12.1f}{cost.fragment / 1e3:15.3f}{rate:>8}")
        return "\n".join(lines)


#: As measured on a GPU on PCIe 5 x16, for whoever doesn't want to measure.
TYPICAL = CopyCosts(
    to_host={
        "plain": Cost(10_000, 2_500, 0.018),
        "batch": Cost(15_000, 900, 0.018),
        "staged": Cost(30_000, 0, 0.019),
        "kernel": Cost(12_000, 0, 0.019),
    },
    to_device={
        "plain": Cost(10_000, 2_500, 0.018),
        "batch": Cost(15_000, 2_500, 0.018),
        "staged": Cost(30_000, 0, 0.019),
        "kernel": Cost(12_000, 0, 0.02),
    },
)
