"""NIXL: a reader that posts READs to the memory that a source registered, and polls until they are done."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from aiokv.bench.child import Line
from aiokv.bench.peers.fragments import FILLED, check, fragments

__all__ = ["read", "serve"]


def _agent(name: str, nbytes: int, filled: int) -> tuple[Any, np.ndarray[Any, np.dtype[np.uint8]]]:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.full(nbytes, filled, np.uint8)
    agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    return agent, memory


async def serve(line: Line, *, nbytes: int) -> None:
    """Be read."""
    agent, memory = _agent("source", nbytes, FILLED)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    line.say(metadata=metadata, address=memory.ctypes.data)
    async for _ in line:
        pass


async def read(line: Line, *, nbytes: int) -> None:
    """Read what each command says, as often as it says."""
    agent, memory = _agent("reader", nbytes, 0)
    theirs, remote = 0, ""
    async for told in line:
        if told["do"] == "connect":
            theirs = told["address"]
            remote = agent.add_remote_agent(base64.b64decode(told["metadata"]))
            remote = remote.decode() if isinstance(remote, bytes) else remote
            line.say()
            continue
        # What to read is prepared before the clock runs.
        handles = []
        for here, there, size in fragments(told["nbytes"], told["paged"], told["at_once"]):
            local = [(memory.ctypes.data + int(at), size, 0) for at in here]
            distant = [(theirs + int(at), size, 0) for at in there]
            handles.append(
                agent.initialize_xfer(
                    "READ",
                    agent.get_xfer_descs(local, "DRAM"),
                    agent.get_xfer_descs(distant, "DRAM"),
                    remote,
                )
            )
        began = time.monotonic_ns()
        for _ in range(told["times"]):
            going = [handle for handle in handles if agent.transfer(handle) != "DONE"]
            while going:
                going = [handle for handle in going if _unfinished(agent.check_xfer_state(handle))]
        took = time.monotonic_ns() - began
        for handle in handles:
            agent.release_xfer_handle(handle)
        check(memory, told["nbytes"] * told["at_once"])
        line.say(ns=took)


def _unfinished(state: str) -> bool:
    if state == "ERR":
        raise RuntimeError("a READ failed")
    return state != "DONE"
