"""A producer with the right token that sends what it likes over a ``tcp`` link."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec

from aiokv.errors import PeerLostError
from aiokv.proto.plan import Chunk
from aiokv.testing.conformance.transportkit import Engine, Part
from aiokv.testing.fuzz.mutation import Mutator
from aiokv.transports.base import Link
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.handshake import new_token
from aiokv.transports.listener import Listener

__all__ = ["send_nonsense"]

_CHUNK = 600
#: How long what was sent is given to arrive (s); on one host it is there at once.
_MOMENT_S = 0.001
#: Numbers that a header may hold where it shouldn't.
_NUMBERS = (0, 1, 2, 7, 255, 65_536, 2**31, 2**32 - 1)
_LARGE = (*_NUMBERS, 2**32, 2**47, 2**63 - 1, 2**63, 2**64 - 1)


async def send_nonsense(mutator: Mutator, engine: Engine, part: Part) -> str:
    """One link from a producer of ours to ``engine``, which expects ``part``, and what came of it.

    Raises:
        AssertionError: More landed than there is, or the link's end wasn't noticed.
    """
    chance = mutator.chance
    links: list[list[socket.socket]] = []
    listening = socket.create_server(("127.0.0.1", 0), backlog=8)
    listening.setblocking(False)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # so that it arrives when it is sent
    token, streams = new_token(), chance.choice((1, 2, 3))
    listener = Listener(listening, token, streams=streams, admit=lambda socks, _: links.append(socks))
    try:
        address = ["127.0.0.1", listening.getsockname()[1], token]
        link = await engine.transport.connect(msgspec.msgpack.encode(address), engine.info)
        try:
            return await _over(mutator, link, links[0], engine, part)
        finally:
            link.close()
    finally:
        listener.close()
        for sock in (sock for socks in links for sock in socks):
            sock.close()


async def _over(mutator: Mutator, link: Link, socks: list[socket.socket], engine: Engine, part: Part) -> str:
    chance = mutator.chance
    expected = chance.random() < 0.9
    if expected:
        link.expect(part.id, part.plan, engine.cache.buffers, part._landed)
    if chance.random() < 0.05:
        link.forget(part.id)
    for data in _frames(mutator, part):
        sock = chance.choice(socks)
        with contextlib.suppress(OSError):
            pieces = chance.choice((1, 1, 1, 3))  # slowly, sometimes
            size = len(data) // pieces + 1
            for at in range(0, len(data), size):
                sock.send(data[at : at + size])
                await asyncio.sleep(0)
        if chance.random() < 0.05:
            link.forget(part.id)
    if chance.random() < 0.3:
        chance.choice(socks).close()
    await asyncio.sleep(_MOMENT_S)
    lost, landed = link.lost, dict(part.landed)
    for layer, nbytes in landed.items():
        if nbytes > part.plan.nbytes(layer):
            raise AssertionError(f"{nbytes} bytes of layer {layer} landed, which has fewer")
    link.close()
    if not link.lost:
        raise AssertionError("a link that was closed is not lost")
    with contextlib.suppress(PeerLostError):
        link.expect(("another", 1), part.plan, engine.cache.buffers, part._landed)
        raise AssertionError("a lost link takes a part")
    return ("cut" if lost else "still there") + (", something landed" if landed else "")


def _frames(mutator: Mutator, part: Part) -> list[bytes]:
    """Some frames, most of them nearly right."""
    chance = mutator.chance
    chunks = part.chunks(_CHUNK)
    made = []
    for _ in range(chance.choice((1, 2, 5))):
        chunk = chance.choice(chunks)
        match chance.randrange(9):
            case 0:
                made.append(mutator.noise(2000))
            case 1:
                name = chance.choice(tuple(chunk._fields))
                value = chance.choice(_NUMBERS if name in ("layer", "layers", "copy") else _LARGE)
                made.append(pack(tag_of(part.id), chunk._replace(**{name: value})) + bytes(100))
            case 2:
                wrong = Chunk(
                    *(chance.choice(_NUMBERS) for _ in range(3)), *(chance.choice(_LARGE) for _ in range(3))
                )
                made.append(pack(tag_of(part.id), wrong) + mutator.noise())
            case 3:
                made.append(pack(chance.randbytes(16), chunk) + chance.randbytes(chunk.nbytes))
            case 4:
                right = pack(tag_of(part.id), chunk) + chance.randbytes(chunk.nbytes)
                made.append(mutator.spoil(right, pack(tag_of(part.id), chance.choice(chunks)))[:65_536])
            case 5:
                right = pack(tag_of(part.id), chunk) + chance.randbytes(chunk.nbytes)
                made.append(right[: chance.randrange(len(right))])
            case _:  # as it should be
                made.append(pack(tag_of(part.id), chunk) + chance.randbytes(chunk.nbytes))
    return made
