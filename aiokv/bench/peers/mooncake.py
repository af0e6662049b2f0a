"""Mooncake's transfer engine over TCP: a reader that reads the memory that a source registered."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

from aiokv.bench.child import Line
from aiokv.bench.peers.fragments import FILLED, check, fragments

__all__ = ["read", "serve"]

_HOST = "127.0.0.1"


def _engine(nbytes: int, filled: int) -> tuple[Any, np.ndarray[Any, np.dtype[np.uint8]]]:
    engine = TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine doesn't come up")
    memory = np.full(nbytes, filled, np.uint8)
    if engine.register_memory(memory.ctypes.data, nbytes):
        raise RuntimeError("the memory can't be registered")
    return engine, memory


async def serve(line: Line, *, nbytes: int) -> None:
    """Be read."""
    engine, memory = _engine(nbytes, FILLED)
    line.say(name=f"{_HOST}:{engine.get_rpc_port()}", address=memory.ctypes.data)
    async for _ in line:
        pass


async def read(line: Line, *, nbytes: int) -> None:
    """Read what each command says, as often as it says."""
    engine, memory = _engine(nbytes, 0)
    theirs, remote = 0, ""
    async for told in line:
        if told["do"] == "connect":
            theirs, remote = told["address"], told["name"]
            line.say()
            continue
        here: list[int] = []
        there: list[int] = []
        sizes: list[int] = []
        for mine, others, size in fragments(told["nbytes"], told["paged"], told["at_once"]):
            here += (memory.ctypes.data + mine).tolist()
            there += (theirs + others).tolist()
            sizes += [size] * len(mine)
        began = time.monotonic_ns()
        for _ in range(told["times"]):
            if len(here) == 1:
                failed = engine.transfer_sync_read(remote, here[0], there[0], sizes[0])
            else:
                failed = engine.batch_transfer_sync_read(remote, here, there, sizes)
            if failed:
                raise RuntimeError("a read failed")
        took = time.monotonic_ns() - began
        check(memory, told["nbytes"] * told["at_once"])
        line.say(ns=took)
