"""The control channels that there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from aiokv.control.base import Channel
from aiokv.control.zmq import ZmqChannel

__all__ = ["CHANNELS"]


def _stream() -> Channel:
    channel: Channel = import_module(_STREAMS).StreamChannel("stream://127.0.0.1:0")
    return channel


_STREAMS = "aiokv.control.streams"

#: Each listens at a free port of this host.
CHANNELS: dict[str, Callable[[], Channel]] = {"zmq": lambda: ZmqChannel("tcp://127.0.0.1:0")}
if find_spec(_STREAMS) is not None:
    CHANNELS["stream"] = _stream
