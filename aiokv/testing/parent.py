"""Processes that must not outlive the one that began them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with"]

#: prctl(2): the signal that comes when the parent ends.
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends, whatever it is doing then (on Linux).

    Args:
        parent: The process that began this one.

    Returns:
        Whether it still lived when that had been said; if not, nobody will kill this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
