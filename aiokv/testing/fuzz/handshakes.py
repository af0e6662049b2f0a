"""Strangers at the data ports, and producers that are not what they seem."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from array import array

import msgspec

from aiokv.errors import PeerLostError
from aiokv.testing.conformance.transportkit import Engine
from aiokv.testing.fuzz.mutation import Mutator
from aiokv.transports.greeting import greet
from aiokv.transports.handshake import NONCE, WELCOME, Ask, Secret, new_token

__all__ = ["meet"]

#: How long a stranger waits for an answer that may not come (s).
_MOMENT_S = 0.01


async def meet(mutator: Mutator, producer: Engine, consumer: Engine) -> str:
    """One encounter at one of the two engines, and what came of it.

    Raises:
        AssertionError: Somebody was let in who shouldn't, or something was raised that shouldn't.
    """
    match mutator.chance.randrange(4):
        case 0:
            return await _misled(mutator, producer, consumer)
        case 1:
            return await _answered_by_a_stranger(mutator, producer, consumer)
        case _:
            return await _dialled_by_a_stranger(mutator, producer)


async def _misled(mutator: Mutator, producer: Engine, consumer: Engine) -> str:
    """The consumer is given a description that isn't quite right."""
    right = producer.transport.describe()
    wrong = mutator.noise() if mutator.chance.random() < 0.2 else mutator.spoil(right)
    try:
        async with asyncio.timeout(0.5):
            link = await consumer.transport.connect(wrong, producer.info)
    except PeerLostError:
        return "a description was refused"
    except TimeoutError:
        return "a description led nowhere"
    link.close()
    fields = msgspec.msgpack.decode(right), msgspec.msgpack.decode(wrong)
    if fields[0][-1] != fields[1][-1]:
        raise AssertionError(f"connected with another token, by {wrong.hex()}")
    return "a description that says the same"


def _family_and_address(described: bytes) -> tuple[int, str | tuple[str, int], bytes]:
    first, second, token = msgspec.msgpack.decode(described)
    if isinstance(second, int):
        return socket.AF_INET, (first, second), token
    return socket.AF_UNIX, f"\0aiokv-{second}", token


async def _dialled_by_a_stranger(mutator: Mutator, producer: Engine) -> str:
    """Somebody dials the producer, and says something that isn't quite right."""
    chance, loop = mutator.chance, asyncio.get_running_loop()
    family, address, token = _family_and_address(producer.transport.describe())
    with socket.socket(family) as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        if chance.random() < 0.1:
            for fd in (await greet(sock, token)).fds:
                os.close(fd)
            with contextlib.suppress(OSError):  # a consumer says nothing more, or it is cut
                await loop.sock_sendall(sock, mutator.noise() or b"?")
            await _ended(sock)
            return "one that talked was cut"
        nonce = await loop.sock_recv(sock, NONCE)
        ask = Ask(streams=chance.randrange(20))
        if chance.random() < 0.3:
            link = chance.choice((bytes(16), chance.randbytes(16)))
            ask = Ask(link, chance.randrange(3), chance.randrange(20))
        key = chance.choice((token, token, token, new_token()))
        proven = key == token and ask.opens and bool(ask.streams)
        ours = chance.randbytes(NONCE)
        right = answer = ask.pack(ours, Secret(key).of_consumer(nonce, ours, ask))
        if chance.random() < 0.5:
            answer = mutator.noise(200) if chance.random() < 0.3 else mutator.spoil(right, nonce)
        with contextlib.suppress(OSError):
            size = chance.choice((1, 10, 1000, 1000, 1000))
            for at in range(0, min(len(answer), 4096), size):
                await loop.sock_sendall(sock, answer[at : at + size])
                await asyncio.sleep(0)
        if chance.random() < 0.3:
            return "left before it was answered"
        said = b""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_MOMENT_S):
                said = await loop.sock_recv(sock, WELCOME.size)
        if said and not (proven and answer.startswith(right)):
            raise AssertionError(f"let in by {answer.hex()}")
        return "let in" if said else "not let in"


async def _ended(sock: socket.socket) -> None:
    """Wait until the other end has closed it."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            pass


async def _answered_by_a_stranger(mutator: Mutator, producer: Engine, consumer: Engine) -> str:
    """The consumer dials, and who answers doesn't do what it should."""
    chance, loop = mutator.chance, asyncio.get_running_loop()
    family, _, token = _family_and_address(producer.transport.describe())
    fields = msgspec.msgpack.decode(producer.transport.describe())
    with socket.socket(family) as listening:
        listening.setblocking(False)
        if family == socket.AF_UNIX:
            fields[1] = secrets.token_hex(16)
            listening.bind(f"\0aiokv-{fields[1]}")
        else:
            listening.bind(("127.0.0.1", 0))
            fields[1] = listening.getsockname()[1]
        listening.listen(4)
        connecting = asyncio.ensure_future(
            consumer.transport.connect(msgspec.msgpack.encode(fields), producer.info)
        )
        sock, _ = await loop.sock_accept(listening)
        with sock, contextlib.suppress(OSError):
            await _answer(mutator, sock, chance.choice((token, new_token())))
    # Nobody listens any more: further streams that the consumer was asked for come to nothing.
    (result,) = await asyncio.gather(connecting, return_exceptions=True)
    if isinstance(result, PeerLostError):
        return "who answered was refused"
    if isinstance(result, BaseException):
        raise result
    result.close()
    return "who answered was taken for the producer"


async def _answer(mutator: Mutator, sock: socket.socket, token: bytes) -> None:
    """Play the producer, more or less."""
    chance, loop = mutator.chance, asyncio.get_running_loop()
    nonce = chance.randbytes(NONCE)
    if chance.random() < 0.2:
        await loop.sock_sendall(sock, mutator.spoil(nonce)[:4096])
        sock.shutdown(socket.SHUT_WR)
    else:
        await loop.sock_sendall(sock, nonce)
    heard = b""
    while len(heard) < Ask.SIZE and (data := await loop.sock_recv(sock, Ask.SIZE - len(heard))):
        heard += data
    if len(heard) < Ask.SIZE:
        return
    ours, ask, _ = Ask.unpack(heard)
    link, streams = chance.randbytes(16), chance.choice((0, 1, ask.streams, 17, 255))
    proof = Secret(token).of_producer(nonce, ours, ask, link, streams)
    extra = chance.choice((b"", bytes(32), mutator.noise(3000)))
    size = chance.choice((len(extra), len(extra), 0, 1, 65_536, 65_537, 2**32 - 1))
    message = WELCOME.pack(link, proof, streams, size) + extra
    if chance.random() < 0.5:
        message = mutator.spoil(message, nonce)[:65_536]
    # Not this socket itself: the consumer would keep it open, and wait until its caller has waited enough.
    with socket.socket(socket.AF_UNIX) as passed:
        fds = [passed.fileno()] * chance.choice((0, 0, 1, 2, 5))
        if sock.family == socket.AF_UNIX and fds and message:
            sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])
        else:
            await loop.sock_sendall(sock, message)
