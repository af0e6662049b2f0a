"""The control channels that there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from aiokv.control.base import Channel
from aiokv.control.streams import StreamChannel
from aiokv.control.zmq import ZmqChannel

__all__ = ["CHANNELS"]

#: Each listens at a free port of this host.
CHANNELS: dict[str, Callable[[], Channel]] = {
    "zmq": lambda: ZmqChannel("tcp://127.0.0.1:0"),
    "stream": lambda: StreamChannel("stream://127.0.0.1:0"),
}
