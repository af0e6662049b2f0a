"""One engine's data plane in a process of its own, told what to do by lines on its standard input."""

from __future__ import annotations

import asyncio
import importlib
import sys

import msgspec
import numpy as np

from aiokv.device.cache import KVCache
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks, Side, plan_copy
from aiokv.transports.base import PeerInfo

LAYOUT = CacheLayout.attention(layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float16")
BLOCKS = GroupBlocks(0, np.arange(63, -1, -1))
TOKENS = 1024


class Told(msgspec.Struct):
    """What one process says to the other, a line of JSON."""

    description: bytes
    placement: Placement
    #: Id of the link that the sender of this opened; empty where it opened none.
    link: bytes = b""


def plan_to(there: Placement, here: Placement):
    src, dst = Side(LAYOUT, there, (BLOCKS,)), Side(LAYOUT, here, (BLOCKS,))
    return plan_copy(src, dst, first_token=0, tokens=TOKENS, heads=(0, 8))


async def main(kind: str) -> None:
    module = importlib.import_module(f"aiokv.transports.{kind}")
    transport = getattr(module, f"{kind.capitalize()}Transport")()
    cache = KVCache.allocate(LAYOUT)
    np.frombuffer(cache.buffers[0].view, np.uint8)[:] = np.arange(cache.buffers[0].nbytes) % 251
    await transport.start(cache, "127.0.0.1")
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    def say(link: bytes = b"") -> None:
        told = Told(transport.describe(), cache.placement, link)
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()

    say()
    while line := await lines.readline():
        told = msgspec.json.decode(line, type=Told)
        if told.link:  # the parent reads, or is to be sent all of it, until one of the two ends
            end = transport.accepted(told.link)
            if not transport.one_sided:
                plan, stream = plan_to(cache.placement, told.placement), cache.device.stream()
                writable = asyncio.Event()
                end.on_writable(writable.set)
                for layer in plan.layers:
                    for chunk in plan.chunks((layer,), 1 << 16):
                        while not end.writable:
                            writable.clear()
                            await writable.wait()
                        end.send(("part", 1), plan, chunk, cache.buffers, stream=stream)
        else:
            info = PeerInfo("tcp://127.0.0.1:1", b"i" * 16, told.placement)
            link = await transport.connect(told.description, info)
            say(link.id)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
