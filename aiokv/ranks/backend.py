"""What reduces the vectors of a torch process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import ClosedError, DeviceError
from aiokv.ranks.base import Collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["collective_of"]


def collective_of(group: ProcessGroup | Collective | None) -> Collective:
    """The collective of a process group's own backend; None is torch's default group.

    Blocks for a moment: it allocates, for NCCL in pinned and in GPU memory.

    Raises:
        TypeError: It is no process group, or not one that this process is in.
        ValueError: Its backend is neither gloo nor NCCL.
        ClosedError: It was destroyed, or torch.distributed wasn't initialized.
        DeviceError: This torch has no torch.distributed, or the GPU can't be used.
    """
    if isinstance(group, Collective):
        return group
    import torch.distributed as dist

    if not dist.is_available():
        raise DeviceError("this torch was built without torch.distributed")
    if group is None:
        if not dist.is_initialized():
            raise ClosedError("there is no default process group: call torch.distributed.init_process_group")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"RankGroup takes a process group that this process is in, not {group!r}")
    backends = backends_of(group)
    if backends.get("cpu") == "gloo":
        from aiokv.ranks.gloo import GlooCollective

        return GlooCollective(group)
    if backends.get("cuda") == "nccl":
        from aiokv.ranks.nccl import NcclCollective

        return NcclCollective(group)
    told = ", ".join(f"{name} for {device}" for device, name in backends.items())
    raise ValueError(f"RankGroup needs a group of gloo or NCCL, this one has {told}")


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """Names of backends by kind of device.

    Raises:
        ClosedError: The group was destroyed.
    """
    import torch.distributed as dist

    try:
        dist.get_backend(group)
        config = dist.get_backend_config(group)
    except ValueError as error:
        raise ClosedError(f"the process group was destroyed: {error}") from error
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)
