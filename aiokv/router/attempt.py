"""One try of a request at one pair of instances: both sides started together, both given up together.

It has one clock (``asyncio.timeout``), which stands for everything that may end it from outside: the
deadline, silence, and the word that the prefill failed or an instance is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import aiohttp

from aiokv.router.asked import Asked
from aiokv.router.events import Events
from aiokv.router.faults import Fault
from aiokv.router.registry import Member
from aiokv.router.settings import RouterSettings

if TYPE_CHECKING:
    from aiokv.router.wire import Wire

__all__ = ["Attempt", "Failed", "Head", "Job"]

_log = logging.getLogger("aiokv")

#: Answers of an instance that are about the request and not about the instance.
_OF_THE_REQUEST = frozenset({400, 413, 422})
#: Nothing was sent: it was refused, or nobody answered in time.
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
#: Seconds in which a stream that said that it is over ends, or its connection is closed.
_END = 1.0


class Failed(Exception):
    """An attempt failed.

    Args:
        kind: For the statistics.
        fault: What the client is told unless it is tried elsewhere.
        member: Whose fault it was.
        again: Whether it may go better elsewhere.
        certain: It is certain that it was the member's fault, and not that of the other one.
        reached: The member was given the request.
    """

    def __init__(
        self,
        kind: str,
        fault: Fault,
        member: Member | None = None,
        *,
        again: bool = True,
        certain: bool = False,
        reached: bool = True,
    ) -> None:
        super().__init__(fault.message)
        self.kind, self.fault, self.member, self.again = kind, fault, member, again
        self.certain, self.reached = certain, reached


@dataclass(frozen=True, slots=True)
class Job:
    """What a client wants, and by when."""

    path: str
    asked: Asked
    #: Names the request towards the instances; issued here.
    transfer: str
    #: The loop's time by which it is over.
    deadline: float
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins: its first events, or all of it."""

    status: int
    body: bytes
    content_type: str


class Attempt:
    """An async context manager; left other than normally, it gives the request up at both instances at once.

    Args:
        wire: What it is sent by.
        job: The request.
        number: Of the attempt.
        prefill: Who computes the prompt.
        decode: Who fetches the KV and answers.
    """

    def __init__(self, wire: Wire, job: Job, number: int, prefill: Member, decode: Member) -> None:
        self._wire = wire
        self._job = job
        self._number = number
        self.prefill, self.decode = prefill, decode
        self._settings: RouterSettings = wire.settings
        self._loop = asyncio.get_running_loop()
        #: Why it was ended from outside; None unless it was.
        self._cause: Failed | None = None
        self._scope = asyncio.timeout(None)
        self._begun = False  # its first token is here
        self._prefilled = False  # the prefill is over, and well
        self._over = False
        self._patient_until = 0.0
        self._response: aiohttp.ClientResponse | None = None  # the decode's, once it answers
        self._prefilling: asyncio.Task[None] | None = None
        self._events = Events()

    async def __aenter__(self) -> Self:
        """Begin at both sides."""
        for member in (self.prefill, self.decode):
            member.in_flight += 1
            member.served += 1
        self._wire.attempts.add(self)
        await self._scope.__aenter__()
        self._wait_until(self._loop.time() + self._settings.first_token)
        self._prefilling = self._loop.create_task(self._prefill())
        # It is over before the answer is, and what the decode does from then on is no load of its.
        self._prefilling.add_done_callback(self._left)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        failed: BaseException | None = error
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            failed = self._cause or self._late()
        finally:
            self._wire.attempts.discard(self)
            self.decode.in_flight -= 1
            if failed is not None:
                self._give_up(failed)
            elif self._prefilling is not None:
                self._wire.let_end(self._prefilling, self._unneeded)
        if failed is not None and failed is not error:
            raise failed

    def _unneeded(self) -> None:
        """The answer is out, and the prefill goes on."""
        if self._prefilling is not None:
            self._prefilling.cancel()
        self._wire.discovery.abort(self.prefill, self._job.transfer, self._number, "the answer is out")

    def _left(self, _: asyncio.Task[None]) -> None:
        self.prefill.in_flight -= 1

    # -- what ends it from outside

    def lost(self, member: Member, why: str) -> None:
        """An instance is no more."""
        needed = member is self.decode or (member is self.prefill and not self._begun and not self._prefilled)
        if needed:
            fault = Fault(502, f"the {member.role} instance is gone: {why}", "instance_lost")
            self._interrupt(Failed("instance_lost", fault, member, certain=True))

    def _interrupt(self, cause: Failed) -> None:
        # Nothing more is to be said to a clock that has run out; what it ran out for comes out.
        if not self._over and self._cause is None and not self._scope.expired():
            self._cause = cause
            self._scope.reschedule(self._loop.time())

    def _late(self) -> Failed:
        now = self._loop.time()
        if now >= self._job.deadline - 0.001:
            return Failed("deadline", Fault(504, "the request's deadline is over", "deadline"), again=False)
        if not self._begun:
            fault = Fault(504, f"no token within {self._settings.first_token:g} s", "first_token")
            return Failed("first_token", fault, self.decode if self._prefilled else self.prefill)
        fault = Fault(504, f"nothing moved for {self._settings.between_tokens:g} s", "stalled")
        return Failed("stalled", fault, again=False)

    def _wait_until(self, when: float) -> None:
        self._patient_until = min(when, self._job.deadline)
        if self._cause is None and not self._scope.expired():
            self._scope.reschedule(self._patient_until)

    def _moved(self) -> None:
        """Something came, so wait for the next: set anew now and then, and not for each token."""
        limit = self._settings.between_tokens
        if self._patient_until < self._job.deadline and self._patient_until - self._loop.time() < limit * 0.9:
            self._wait_until(self._loop.time() + limit)

    # -- the prefill

    async def _prefill(self) -> None:
        body = self._job.asked.for_prefill(self._params(do_remote_decode=True))
        try:
            response = await self._post(self.prefill, body)
            async with response:
                answer = await self._whole(response, self.prefill)
                if response.status != 200:
                    raise self._refused(response.status, answer, self.prefill)
            self._prefilled = True
            if not self._job.asked.stream and not self._over:
                self._wait_until(self._job.deadline)  # nobody sees its first token
        except Failed as failed:
            if not self._begun:
                self._interrupt(failed)

    # -- the decode

    async def head(self) -> Head:
        """The first events of a stream, or the whole answer.

        Raises:
            Failed: There is none.
        """
        body = self._job.asked.for_decode(
            self._params(do_remote_prefill=True, remote_addresses=list(self.prefill.report.engines))
        )
        response = self._response = await self._post(self.decode, body)
        kind = response.headers.get("Content-Type", "application/json")
        if response.status != 200:
            raise self._refused(response.status, await self._whole(response, self.decode), self.decode)
        if not self._job.asked.stream:
            answer = await self._whole(response, self.decode)
            self._begun = True
            return Head(200, answer, kind)
        first = await self.next_piece()
        while first is not None and not self._events.told:
            first = await self.next_piece()
        if first is None or self._events.failed:
            fault = Fault(502, "the decode instance ended its answer before a token", "decode_failed")
            raise Failed("decode_failed", fault, self.decode)
        self._begun = True
        self._wait_until(self._loop.time() + self._settings.between_tokens)
        return Head(200, first, kind)

    async def next_piece(self) -> bytes | None:
        """The next whole events of the stream; None at its end.

        Raises:
            Failed: It broke off.
        """
        if self._response is None:
            raise RuntimeError("head() comes first")
        content = self._response.content
        while True:
            try:
                data = await (self._rest(content) if self._events.ended else content.readany())
            except (aiohttp.ClientError, OSError) as error:
                raise self._broken(self.decode, error) from error
            if not data:
                if not self._events.ended:
                    raise self._broken(self.decode, "its stream ended in the middle")
                return None
            if self._begun:
                self._moved()
            try:
                piece = self._events.feed(data)
            except ValueError as error:
                fault = Fault(502, f"the decode instance: {error}", "decode_failed")
                raise Failed("decode_failed", fault, self.decode) from error
            if piece:
                return piece

    async def _rest(self, content: aiohttp.StreamReader) -> bytes:
        """What comes after the last event; where the answer doesn't end then, its connection does."""
        try:
            async with asyncio.timeout(_END):
                return await content.readany()
        except TimeoutError:
            if self._response is not None:
                self._response.close()
            return b""

    # -- both

    def _params(self, **more: object) -> dict[str, object]:
        return {
            "transfer_id": self._job.transfer,
            "attempt": self._number,
            "deadline": round(max(0.001, self._job.deadline - self._loop.time()), 3),
            **more,
        }

    async def _post(self, member: Member, body: bytes) -> aiohttp.ClientResponse:
        headers = {**self._job.headers, "Authorization": f"Bearer {member.report.token}"}
        try:
            return await self._wire.session.post(
                member.http + self._job.path, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(member, error) from error

    async def _whole(self, response: aiohttp.ClientResponse, member: Member) -> bytes:
        found, most = bytearray(), self._settings.answer
        try:
            async for data in response.content.iter_any():
                found += data
                if len(found) > most:
                    fault = Fault(
                        502, f"the {member.role} instance answered more than {most} bytes", "answer"
                    )
                    raise Failed(f"{member.role}_failed", fault, member, again=False)
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(member, error) from error
        return bytes(found)

    def _broken(self, member: Member, error: object) -> Failed:
        """Its connection failed: it gets nothing more until it says that it is there."""
        self._wire.discovery.suspect(member)
        _log.info("router: %s instance %s: %s", member.role, member.http, error)
        fault = Fault(502, f"the {member.role} instance can't be reached or broke off", "instance_lost")
        reached = not isinstance(error, _NOT_CONNECTED)
        return Failed("instance_lost", fault, member, certain=True, reached=reached)

    @staticmethod
    def _refused(status: int, body: bytes, member: Member) -> Failed:
        if status in _OF_THE_REQUEST:
            fault = Fault(status, "the request was refused", "refused", body=body)
            return Failed("refused", fault, again=False)
        fault = Fault(502, f"the {member.role} instance answered {status}", f"{member.role}_failed")
        return Failed(f"{member.role}_failed", fault, member)

    def _give_up(self, why: BaseException) -> None:
        """Both sides, now: by closing the connections, and by a message where that isn't noticed."""
        if self._prefilling is not None:
            self._prefilling.cancel()
        if self._response is not None:
            self._response.close()
        told = "the client is gone" if isinstance(why, asyncio.CancelledError) else str(why)
        for member in (self.prefill, self.decode):
            self._wire.discovery.abort(member, self._job.transfer, self._number, told)
