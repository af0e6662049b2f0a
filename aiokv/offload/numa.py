"""Which CPUs are near a GPU: memory is taken from the node of the CPU that asks for it."""

from __future__ import annotations

import re
from pathlib import Path

from aiokv.device.base import Device

__all__ = ["cpus_near", "cpus_of"]

_SYSTEM = Path("/sys")


def cpus_near(device: Device, system: Path = _SYSTEM) -> set[int]:
    """The CPUs of the NUMA node that a GPU is attached to. Reads files, so not for a loop.

    Args:
        device: Of any kind.
        system: Where sysfs is.

    Returns:
        Empty where the device is no GPU, the machine has one node only, or doesn't tell.
    """
    context = getattr(device, "context", None)
    if device.kind != "cuda" or context is None:
        return set()
    try:
        if len(list((system / "devices/system/node").glob("node[0-9]*"))) < 2:
            return set()
        bus = str(context.cuda.runtime.deviceGetPCIBusId(context.ordinal)).lower()
        node = int((system / "bus/pci/devices" / bus / "numa_node").read_text(encoding="ascii"))
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
        return cpus_of(listed) if node >= 0 else set()
    except (AttributeError, OSError, ValueError):
        return set()


def cpus_of(listed: str) -> set[int]:
    """CPUs as the kernel lists them: ``0-3,8``.

    Raises:
        ValueError: It is no such list.
    """
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match is None:
            raise ValueError(f"no list of CPUs: {listed!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        found.update(range(first, last + 1))
    return found
