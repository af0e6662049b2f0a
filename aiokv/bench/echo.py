"""An echo by plain pyzmq: the least that a question and its answer take over ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from aiokv.bench.child import Line

__all__ = ["FUNCTION", "connected", "round_trips", "serve"]

#: For ``aiokv.bench.child.child``.
FUNCTION = "aiokv.bench.echo:serve"

_PATIENCE_MS = 10_000


async def serve(line: Line) -> None:
    """Answer each message with itself. Blocking calls: there is no loop in the way."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        line.say(port=sock.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            sock.send(sock.recv())


@contextmanager
def connected(port: int) -> Iterator[zmq.Socket[bytes]]:
    """A socket to the echo."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        sock.connect(f"tcp://127.0.0.1:{port}")
        yield sock


def round_trips(sock: zmq.Socket[bytes], count: int, nbytes: int) -> list[int]:
    """How long each of so many echoes took, one after another, in nanoseconds."""
    message, found = bytes(nbytes), []
    for _ in range(count):
        began = time.monotonic_ns()
        sock.send(message)
        sock.recv()
        found.append(time.monotonic_ns() - began)
    return found
