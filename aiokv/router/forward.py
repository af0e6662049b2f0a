"""From a client's request to its answer: chooses instances, tries twice at most, and passes the answer on."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Mapping

from aiohttp import web

from aiokv.router.admission import Admission
from aiokv.router.asked import Asked, read
from aiokv.router.attempt import Attempt, Failed, Head, Job
from aiokv.router.faults import Fault, bad, unavailable
from aiokv.router.figures import Figures
from aiokv.router.registry import Group, Member, Registry
from aiokv.router.selection import Selection
from aiokv.router.wire import Wire

__all__ = ["Forwarder"]

_log = logging.getLogger("aiokv")

#: Headers of a client's that go on to instances; all others stay here.
_PASSED_ON = ("traceparent", "tracestate")
_TIMEOUT, _REQUEST_ID = "X-Request-Timeout", "X-Request-Id"
#: Seconds that the last words to a client may take.
_LAST_WORDS = 1.0
#: Attempts that instances were given, and with those that nobody could be reached for.
_ATTEMPTS, _MOST_ATTEMPTS = 2, 4
#: What a client that went away is counted as.
_GONE = 499


class Forwarder:
    """Answers the two calls that generate text.

    Args:
        wire: How instances are reached.
        registry: Who they are.
        selection: Which of them.
        figures: What is counted.

    Attributes:
        admission: How many are answered and wait.
        closing: Why nothing new is taken; empty while it is.
    """

    def __init__(self, wire: Wire, registry: Registry, selection: Selection, figures: Figures) -> None:
        self._wire = wire
        self._registry = registry
        self._selection = selection
        self._figures = figures
        self._settings = wire.settings
        self.admission = Admission(self._settings.concurrency, self._settings.queue)
        self.closing = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._counted(request, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._counted(request, chat=True)

    async def _counted(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        began = time.monotonic()  # uvloop's own clock counts milliseconds
        status, how = 500, "internal_error"
        try:
            answer, failed = await self._answer(request, began, chat=chat)
            status, how = answer.status, failed or "answered"
            return answer
        except Fault as fault:
            status, how = fault.status, fault.code
            raise
        except (asyncio.CancelledError, ConnectionError):
            status, how = _GONE, "client_gone"
            raise
        finally:
            self._figures.request(status, how, time.monotonic() - began)

    async def _answer(
        self, request: web.Request, began: float, *, chat: bool
    ) -> tuple[web.StreamResponse, str]:
        """The answer, and why it ended early; empty where it didn't."""
        self._refuse_when_closing()
        deadline = asyncio.get_running_loop().time() + self._allowed(request.headers)
        with self.admission.arrive():
            body = await self._body(request, deadline)
        self._refuse_when_closing()
        asked = read(body, chat=chat)
        self._check(asked)
        async with self.admission.enter(deadline):
            job = Job(
                path=request.path,
                asked=asked,
                transfer=uuid.uuid4().hex,
                deadline=deadline,
                headers=_passed_on(request.headers),
            )
            return await self._tried(request, job, began)

    def _refuse_when_closing(self) -> None:
        if self.closing:
            raise unavailable(self.closing, "closing")

    async def _body(self, request: web.Request, deadline: float) -> bytes:
        most = self._settings.body
        if coding := request.headers.get("Content-Encoding"):
            raise Fault(415, f"Content-Encoding: {coding:.40} is not supported", "unsupported_encoding")
        if (request.content_length or 0) > most:
            raise _too_large(most)
        until = min(deadline, asyncio.get_running_loop().time() + self._settings.receive)
        try:
            async with asyncio.timeout_at(until):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(most) from None
        except TimeoutError:
            raise Fault(408, "the request didn't come in time", "receive_timeout") from None

    def _allowed(self, headers: Mapping[str, str]) -> float:
        """Seconds that the request may take."""
        wanted = headers.get(_TIMEOUT)
        if wanted is None:
            return self._settings.deadline
        try:
            seconds = float(wanted)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise bad(f"{_TIMEOUT} is a number of seconds above 0, not {wanted!r}")
        return min(seconds, self._settings.deadline)

    def _check(self, asked: Asked) -> None:
        """Refuse what nobody could answer."""
        if not self._registry.members:
            raise unavailable("no instance has registered with this router")
        if not any(asked.model in each.report.models for each in self._registry.members.values()):
            raise Fault(
                404, f"no instance serves the model {asked.model!r}", "model_not_found", param="model"
            )
        context = self._registry.context(asked.model)
        if context and asked.tokens > context:
            raise bad(
                f"the prompt has {asked.tokens} tokens, and {asked.model!r} takes {context} with its answer",
                "prompt",
                "context_length_exceeded",
            )

    # -- attempts

    async def _tried(self, request: web.Request, job: Job, began: float) -> tuple[web.StreamResponse, str]:
        failures: list[tuple[Failed, Attempt]] = []
        reached = 0
        for number in range(_MOST_ATTEMPTS):
            attempt = Attempt(self._wire, job, number, *self._chosen(job, failures))
            try:
                return await self._attempted(request, job, attempt, began)
            except Failed as failed:
                self._figures.failure(failed.kind)
                failures.append((failed, attempt))
                _log.info("router: %s, attempt %d: %s", job.transfer, number, failed)
                reached += failed.reached
                if not failed.again or reached == _ATTEMPTS:
                    break
        raise failures[-1][0].fault

    def _chosen(self, job: Job, failures: list[tuple[Failed, Attempt]]) -> tuple[Member, Member]:
        """The next pair: without whose fault the last attempt was, or without both where that isn't certain.

        Raises:
            Fault: There is none.
        """
        model = job.asked.model
        groups: list[Group] = []
        if failures:
            guilty = {failed.member for failed, _ in failures if failed.member is not None}
            failed, attempt = failures[-1]
            if not failed.certain:
                groups = self._registry.groups(model, {*guilty, attempt.prefill, attempt.decode})
            if not groups and failed.member is not None:
                groups = self._registry.groups(model, guilty)
        if not groups and not failures:
            groups = self._registry.groups(model)
        if not groups:
            raise failures[-1][0].fault if failures else unavailable(self._registry.lacking(model))
        return self._selection.choose(groups, job.asked.prompt)

    async def _attempted(
        self, request: web.Request, job: Job, attempt: Attempt, began: float
    ) -> tuple[web.StreamResponse, str]:
        """Answer by one attempt; a stream that broke off is an answer, too, and ends with an error.

        Raises:
            Failed: Nothing was said to the client yet.
        """
        response: web.StreamResponse | None = None
        try:
            async with attempt:
                head = await attempt.head()
                if not job.asked.stream:
                    return _whole(head, job), ""
                self._figures.first_token(time.monotonic() - began)
                response = web.StreamResponse(status=head.status, headers=_headers(head, job))
                await response.prepare(request)
                piece: bytes | None = head.body
                while piece is not None:
                    await response.write(piece)
                    piece = await attempt.next_piece()
                await response.write_eof()
        except Failed as failed:
            if response is None:
                raise
            self._figures.failure(failed.kind)
            await self._last_words(request, response, failed.fault)
            return response, failed.fault.code
        return response, ""

    @staticmethod
    async def _last_words(request: web.Request, response: web.StreamResponse, fault: Fault) -> None:
        """Say in a stream that it failed; a client that doesn't read is cut off."""
        try:
            async with asyncio.timeout(_LAST_WORDS):
                await response.write(fault.event)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def _headers(head: Head, job: Job) -> dict[str, str]:
    return {
        "Content-Type": head.content_type,
        "Cache-Control": "no-store",
        _REQUEST_ID: job.transfer,
        "X-Accel-Buffering": "no",
    }


def _whole(head: Head, job: Job) -> web.Response:
    return web.Response(status=head.status, body=head.body, headers=_headers(head, job))


def _too_large(most: int) -> Fault:
    return Fault(413, f"the request is larger than {most} bytes", "request_too_large")
