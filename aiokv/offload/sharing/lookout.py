"""Asks a pool's owner what is there, from a thread that has no event loop, and never waits for long."""

from __future__ import annotations

import logging
import math
import select
import socket
import time
from collections.abc import Callable, Sequence

from aiokv.errors import PeerLostError, Refused, RemoteProtocolError
from aiokv.offload.policies import Key
from aiokv.offload.sharing.door import knock
from aiokv.offload.sharing.keys import encoded
from aiokv.offload.sharing.messages import (
    LENGTH,
    MOST_FRAME,
    VERSION,
    Done,
    FromGuest,
    Look,
    Refusal,
    There,
    frame,
    from_owner,
)

__all__ = ["Lookout"]

_log = logging.getLogger("aiokv")

#: How long a caller waits for an answer, in seconds, from when the oldest question was asked: an owner that
#: has nothing else to do answers in a tenth of that.
_PROMPT_S = 0.002
#: How long an owner may take to answer, in seconds; then it is taken for lost.
_SILENCE_S = 1.0
#: After how many seconds a lost owner is asked again, each time twice as many.
_FIRST_S = 0.5
_LAST_S = 30.0
_READ = 64 << 10


class Lookout:
    """A line to the owner of a ``HostPool`` that holds nothing there, and is told nothing unasked.

    It belongs to one thread, which it keeps for two thousandths of a second at most, and does nothing while
    nobody asks. Where the owner is lost, silent or refuses, nothing is there.

    Args:
        path: Where the owner is.
        digests: Of the caches that are to load what is found, as of ``digest_of``: what one of them can't
            have is not there.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self, path: str, digests: Sequence[bytes], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._digests = list(digests)
        self._clock = clock
        #: None while there is no connection.
        self._sock: socket.socket | None = None
        self._closed = False
        #: What the socket has not taken yet, and what came that is no whole message.
        self._out = bytearray()
        self._read = bytearray()
        #: When each question that isn't answered was asked, in order.
        self._asked: dict[int, float] = {}
        self._answers: dict[int, int] = {}
        self._number = 0
        #: When an owner that was lost is looked for, and after how many seconds the next time.
        self._again = 0.0
        self._delay = _FIRST_S

    def ask(self, keys: Sequence[Key]) -> int:
        """Ask how many blocks of a prefix are there. Never waits.

        Args:
            keys: As for ``HostTier.lookup``.

        Returns:
            A number, for ``answer`` or ``forget``.

        Raises:
            CapacityError, TypeError: A hash can't be one in a pool.
        """
        self._number += 1
        number, names = self._number, encoded(keys)
        self._knock()
        if self._sock is None or not self._say(There(number, self._digests, names)):
            self._answers[number] = 0
        else:
            self._asked[number] = self._clock()
            self._exchange()
        return number

    def answer(self, number: int) -> int | None:
        """How many are there, said once; None: not known yet. They may go at any time."""
        if number in self._asked:
            self._exchange()
            oldest = next(iter(self._asked.values()), 0.0)
            while number in self._asked and (left := oldest + _PROMPT_S - self._clock()) > 0:
                self._wait(left)
                self._exchange()
        if number in self._asked and self._clock() - self._asked[number] > _SILENCE_S:
            self._lose(f"it has not answered for {_SILENCE_S} s")
        return None if number in self._asked else self._answers.pop(number, 0)

    def forget(self, number: int) -> None:
        """Nobody wants an answer any more."""
        self._asked.pop(number, None)
        self._answers.pop(number, None)

    def close(self) -> None:
        """Leave; what is asked from now on is not there. May be called twice."""
        self._closed = True
        self._drop()

    # -- the connection

    def _knock(self) -> None:
        """Connect, where it is time to; that is done at once or not at all."""
        if self._sock is not None or self._closed or self._clock() < self._again:
            return
        try:
            self._sock = knock(self._path)
        except (PeerLostError, Refused) as error:
            self._lose(str(error))
            return
        self._say(Look(VERSION))

    def _say(self, message: FromGuest) -> bool:
        data = frame(message)
        if len(data) > MOST_FRAME or len(self._out) > MOST_FRAME:
            return False
        self._out += data
        return True

    def _wait(self, left: float) -> None:
        if self._sock is None:
            return
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.poll(math.ceil(1e3 * left))

    def _exchange(self) -> None:
        """Send and take what the socket takes and has."""
        if self._sock is None:
            return
        try:
            self._send(self._sock)
            while data := self._sock.recv(_READ):
                self._read += data
                if not self._take():
                    return
        except (BlockingIOError, InterruptedError):
            return
        except RemoteProtocolError as error:  # which is an OSError, too
            self._lose(str(error))
        except OSError as error:
            self._lose(f"the connection broke: {error}")
        else:
            self._lose("it closed the connection")

    def _send(self, sock: socket.socket) -> None:
        while self._out:
            try:
                del self._out[: sock.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return

    def _take(self) -> bool:
        """Take the messages that are complete; False if one of them ended the connection."""
        while len(self._read) >= LENGTH:
            end = LENGTH + int.from_bytes(self._read[:LENGTH], "big")
            if end > MOST_FRAME:
                raise RemoteProtocolError(f"a message of {end} bytes")
            if len(self._read) < end:
                break
            body = bytes(self._read[LENGTH:end])
            del self._read[:end]
            match from_owner(body):
                case Done(id=number, count=count):
                    self._delay = _FIRST_S
                    if self._asked.pop(number, None) is not None:
                        self._answers[number] = count
                case Refusal(reason=reason):
                    self._lose(reason)
                    return False
                case other:
                    raise RemoteProtocolError(f"a {type(other).__name__} at a wrong time")
        return True

    def _lose(self, reason: str) -> None:
        """There is no owner for the moment: nothing of what was asked is there."""
        _log.info("the host pool at %s can't be asked: %s", self._path, reason)
        self._drop()
        self._again = self._clock() + self._delay
        self._delay = min(2 * self._delay, _LAST_S)

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._out.clear()
        self._read.clear()
        self._answers.update(dict.fromkeys(self._asked, 0))
        self._asked.clear()
