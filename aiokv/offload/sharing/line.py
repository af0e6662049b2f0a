"""One connection between a pool's owner and one that shares it: messages in order, and descriptors."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable

from aiokv.errors import RemoteProtocolError
from aiokv.offload.sharing.messages import LENGTH, MOST_FRAME

__all__ = ["Line"]

_log = logging.getLogger("aiokv")

#: Bytes that are read in one go.
_READ = 256 << 10
#: Descriptors in one go at most (SCM_MAX_FD).
_MOST_FDS = 253
#: While so many bytes wait to be taken by the other end, nothing that it says is read.
_FULL = 1 << 20
#: With so many it is given up: it doesn't read, and this process's memory is bounded.
_TOO_FULL = 64 << 20


class Line:
    """Reads and writes as the socket allows; tells of each message, and once of its end.

    Args:
        sock: Connected and non-blocking; owned by this.
        received: Told of the body of each message. What it raises of the peer's mistakes ends the line.
        lost: Told why it ended, unless it was closed here.
        descriptors: Whether any are taken; they wait in ``fds``, in order, and are this line's until then.
            Who takes them also reads whatever waits to be sent: if both ends stopped reading until the other
            has read, both would wait for ever.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        *,
        descriptors: bool = False,
    ) -> None:
        self._sock = sock
        self._received = received
        self._lost = lost
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        #: What the socket didn't take yet, each with the descriptors that go with its first byte.
        self._waiting: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        #: Bytes of these.
        self._size = 0
        self._paused = False
        #: Who wants to know when nothing waits.
        self._idle: list[Callable[[], None]] = []
        #: Nothing that is sent arrives any more.
        self._broken = False
        self.fds: deque[int] = deque()
        #: Says whether the other end is closed, or the connection broke.
        self._closing = select.poll()
        self._closing.register(sock.fileno(), select.POLLRDHUP)
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._sock.fileno() < 0

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a message, after all others; does nothing once the line is closed.

        Args:
            data: As ``frame`` makes it.
            fds: Descriptors that come with it. They have to stay open until it is sent.
        """
        if self.closed or self._broken:
            return
        idle = not self._waiting
        self._waiting.append((memoryview(data), fds))
        self._size += len(data)
        if idle:
            self._write()
        else:
            self._pace()
        if self._size > _TOO_FULL:
            # Not from here, whose caller is in the middle of something.
            self._loop.call_soon(self._end, "it doesn't read what it is sent")

    def drain(self) -> None:
        """Take what there is to be read of an end that is gone."""
        while not self.closed and self._some():
            pass

    def close(self) -> None:
        """End it; nobody is told. May be called twice."""
        if self.closed:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._waiting.clear()
        for callback in self._idle:
            callback()
        self._idle.clear()
        while self.fds:
            os.close(self.fds.popleft())

    def _end(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._lost(reason)

    # -- writing

    def _write(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # The other end is closed. It may have said why, or that it is done: that is still read.
                self._broken = True
                self._waiting.clear()
                self._size = 0
                self._loop.call_soon(self._drained)
                break
            self._size -= sent
            if sent < len(data):
                self._waiting[0] = (data[sent:], ())
                break
            self._waiting.popleft()
        if self._waiting:
            self._loop.add_writer(self._sock.fileno(), self._write)
        else:
            self._loop.remove_writer(self._sock.fileno())
            for callback in self._idle:
                callback()
            self._idle.clear()
        self._pace()

    def _pace(self) -> None:
        """Read nothing more while much waits to be sent: answers would add to it."""
        if self._descriptors or self._paused is (self._size > _FULL):
            return
        self._paused = not self._paused
        if self._paused:
            self._loop.remove_reader(self._sock.fileno())
        else:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _drained(self) -> None:
        self.drain()
        self._end("it takes nothing any more")

    def on_idle(self, callback: Callable[[], None]) -> None:
        """Call this once all that was sent is out of here; at once if it is, or will never be."""
        if self._waiting and not self.closed:
            self._idle.append(callback)
        else:
            callback()

    # -- reading

    def _readable(self) -> None:
        """Read once, or, from an end that is closed, all there is.

        When a socket has an error pending, uvloop calls its reader once more and never again.
        """
        if self._some() and not self.closed and self._closing.poll(0):
            self.drain()

    def _some(self) -> bool:
        """Read once; whether anything was there."""
        try:
            data = self._receive()
            if not data:
                self._end("it closed the connection, or is dead")
                return False
            self._read += data
            self._take()
        except (BlockingIOError, InterruptedError):
            return False
        except RemoteProtocolError as error:  # which is an OSError, too
            self._end(str(error))
            return False
        except OSError as error:
            self._end(f"the connection broke: {error}")
            return False
        except Exception as error:  # noqa: BLE001 - see below
            # A mistake of ours in what one of many said; the others have nothing to do with it.
            _log.exception("a connection of a host pool is given up")
            self._end(f"it could not be served: {error!r}")
            return False
        return True

    def _receive(self) -> bytes:
        if not self._descriptors:
            return self._sock.recv(_READ)  # what else comes along, the kernel closes
        data, rights, flags, _ = self._sock.recvmsg(
            _READ, socket.CMSG_SPACE(4 * _MOST_FDS), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.fds.extend(array("i", payload[: len(payload) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise RemoteProtocolError("this process may not open as many descriptors as it is passed")
        return data

    def _take(self) -> None:
        """Tell of the messages that are complete."""
        at, read = 0, self._read
        while len(read) - at >= LENGTH and not self.closed:
            size = int.from_bytes(read[at : at + LENGTH], "big")
            if size > MOST_FRAME:
                raise RemoteProtocolError(f"a message of {size} bytes, and at most {MOST_FRAME} are read")
            end = at + LENGTH + size
            if len(read) < end:
                break
            body = bytes(read[at + LENGTH : end])
            at = end
            self._received(body)
        del read[:at]
