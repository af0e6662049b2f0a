from __future__ import annotations

import asyncio
import os
import socket

import pytest

from aiokv.errors import PeerLostError
from aiokv.transports import listener
from aiokv.transports.greeting import greet
from aiokv.transports.handshake import Ask, Secret, new_token
from aiokv.transports.listener import Listener

PATIENCE_S = 20


class Door:
    """A listener at an abstract unix socket, and what it let in."""

    def __init__(self, extra: bytes = b"", fds: tuple[int, ...] = (), streams: int = 1) -> None:
        self.token = new_token()
        self.let_in: list[tuple[list[socket.socket], bytes]] = []
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.bind("\0aiokv-test-" + os.urandom(8).hex())
        sock.listen(200)
        self.address = sock.getsockname()
        self.listener = Listener(sock, self.token, extra=extra, fds=fds, streams=streams, admit=self.admit)

    def admit(self, socks: list[socket.socket], link: bytes) -> None:
        self.let_in.append((socks, link))

    def dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect(self.address)
        return sock

    def close(self) -> None:
        self.listener.close()
        self.listener.close()
        for socks, _ in self.let_in:
            for sock in socks:
                sock.close()


async def end_of(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        while await loop.sock_recv(sock, 100):
            pass


@pytest.mark.asyncio
async def test_both_ends_agree_on_a_link_and_pass_descriptors() -> None:
    fd = os.memfd_create("passed")
    os.write(fd, b"x")
    door = Door(extra=b"extra" * 1000, fds=(fd, fd))
    with door.dial() as sock:
        welcome = await greet(sock, door.token)
    assert welcome.extra == b"extra" * 1000
    assert [link for _, link in door.let_in] == [welcome.link]
    assert len(welcome.fds) == 2
    for passed in welcome.fds:
        assert os.fstat(passed).st_ino == os.fstat(fd).st_ino
        assert not os.get_inheritable(passed)
        os.close(passed)
    door.close()
    os.close(fd)


@pytest.mark.asyncio
async def test_a_token_is_never_sent() -> None:
    door = Door()
    with door.dial() as sock:
        heard = b""

        class Tap:
            def __getattr__(self, name: str):
                return getattr(sock, name)

            def send(self, data: bytes) -> int:
                nonlocal heard
                heard += data
                return sock.send(data)

        await greet(Tap(), door.token)
    assert len(heard) == Ask.SIZE
    assert door.token not in heard
    door.close()


@pytest.mark.asyncio
async def test_a_wrong_token_is_refused_and_others_are_not() -> None:
    door = Door()
    with door.dial() as wrong, door.dial() as right:
        with pytest.raises(PeerLostError):
            await greet(wrong, new_token())
        await greet(right, door.token)
    assert len(door.let_in) == 1
    door.close()


@pytest.mark.asyncio
async def test_an_answer_can_not_be_used_again() -> None:
    """What one connection proved proves nothing on another, whose nonce differs."""
    door = Door()
    loop = asyncio.get_running_loop()
    with door.dial() as first, door.dial() as second:
        nonce = await loop.sock_recv(first, 16)
        ours = b"c" * 16
        answer = Ask().pack(ours, Secret(door.token).of_consumer(nonce, ours, Ask()))
        await loop.sock_sendall(second, answer)
        await end_of(second)
        await loop.sock_sendall(first, answer)
        assert await loop.sock_recv(first, 200)
    assert len(door.let_in) == 1
    door.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("welcome", [b"w" * 53, b""])
async def test_a_stranger_at_the_producers_address_is_found_out(welcome: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.setblocking(False)
        b.send(b"n" * 16 + welcome)
        b.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLostError, match=r"token|closed"):
            await greet(a, new_token())


@pytest.mark.asyncio
async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.01)
    door = Door()
    with door.dial() as sock:
        await end_of(sock)
    assert not door.listener._pending
    door.close()


@pytest.mark.asyncio
async def test_the_oldest_stranger_gives_way() -> None:
    door = Door()
    strangers = [door.dial() for _ in range(listener._MAX_PENDING + 5)]
    with door.dial() as sock:
        await greet(sock, door.token)
    for stranger in strangers[:6]:
        await end_of(stranger)
    assert len(door.listener._pending) == listener._MAX_PENDING - 1
    door.close()
    for stranger in strangers:
        stranger.close()


@pytest.mark.asyncio
async def test_no_descriptor_left_to_accept_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting pauses, where going on would spin, and goes on later."""
    door = Door()
    real = door.listener._sock
    failures = [OSError(24, "Too many open files")]

    class Short:
        def __getattr__(self, name: str):
            return getattr(real, name)

        def accept(self):
            if failures:
                raise failures.pop()
            return real.accept()

    door.listener._sock = Short()
    with door.dial() as sock:
        async with asyncio.timeout(PATIENCE_S):
            await greet(sock, door.token)
    assert not failures
    door.close()
