"""UCXX with asyncio: a reader asks on an endpoint, and a source sends that many messages."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import ucxx

from aiokv.bench.child import Line
from aiokv.bench.peers.fragments import FILLED, check

__all__ = ["read", "serve"]


async def serve(line: Line, *, nbytes: int) -> None:
    """Send what the reader asks for."""
    memory = np.full(nbytes, FILLED, np.uint8)

    async def answer(endpoint: Any) -> None:  # noqa: ANN401 - the library has no types
        asked = np.empty(2, np.int64)
        while True:
            await endpoint.recv(asked)
            size, count = asked.tolist()
            await asyncio.gather(*(endpoint.send(memory[at * size : (at + 1) * size]) for at in range(count)))

    listener = ucxx.create_listener(answer, 0)
    line.say(port=listener.port)
    async for _ in line:
        pass


async def read(line: Line, *, nbytes: int) -> None:
    """Receive what each command says, as often as it says."""
    memory = np.zeros(nbytes, np.uint8)
    endpoint: Any = None
    async for told in line:
        if told["do"] == "connect":
            endpoint = await ucxx.create_endpoint("127.0.0.1", told["port"])
            line.say()
            continue
        size, count = told["nbytes"], told["at_once"]
        asked = np.array([size, count])
        began = time.monotonic_ns()
        for _ in range(told["times"]):
            await endpoint.send(asked)
            await asyncio.gather(*(endpoint.recv(memory[at * size : (at + 1) * size]) for at in range(count)))
        took = time.monotonic_ns() - began
        check(memory, size * count)
        line.say(ns=took)
