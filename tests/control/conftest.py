"""Channels in other processes, to be stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

PEER = """
import asyncio, sys
if sys.argv[1].startswith("tcp:"):
    from aiokv.control.zmq import ZmqChannel as Channel
else:
    from aiokv.control.streams import StreamChannel as Channel

async def main():
    channel = Channel(sys.argv[1])
    print(await channel.start(lambda frame, *_: print(frame.decode().strip(), flush=True)), flush=True)
    for address in sys.argv[2:]:
        channel.open(address).send(b"hello")
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Process:
    """A channel in another process, that prints what it gets."""

    def __init__(self, process, address):
        self.process = process
        self.address = address

    async def line(self):
        async with asyncio.timeout(20):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self):
        self.process.kill()
        await self.process.communicate()


@contextlib.asynccontextmanager
async def run_process(address, *peers):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, address, *peers,
        cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    peer = Process(process, None)
    try:
        peer.address = await peer.line()
        yield peer
    finally:
        if process.returncode is None:
            await peer.kill()
        # asyncio closes the pipe in a callback of its own.
        process._transport.close()
        await asyncio.sleep(0)


@pytest.fixture
def another_process():
    """``async with another_process(address, *peers) as process``: it says hello to the peers."""
    return run_process
