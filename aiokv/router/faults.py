"""What a client is told when it gets no answer: a status, and an error in OpenAI's shape."""

from __future__ import annotations

import math

import msgspec

__all__ = ["Fault", "bad", "busy", "unavailable"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Fault(Exception):
    """Why there is no answer.

    Args:
        status: HTTP's.
        message: For whoever reads it.
        code: For programs.
        param: The field of the request that is at fault.
        retry_after: Seconds after which it may go better; None: nothing is known of that.
        body: What an instance answered, to be passed on as it is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        body: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after
        self._body = body

    @property
    def body(self) -> bytes:
        """The answer's body, JSON."""
        if self._body:
            return self._body
        error = {
            "message": self.message,
            "type": _KINDS.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        found = {"Content-Type": "application/json"}
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found

    @property
    def event(self) -> bytes:
        """The same as an event of a stream that had begun."""
        return b"data: " + self.body.replace(b"\n", b" ") + b"\n\n"


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> Fault:
    """The request can't be meant."""
    return Fault(400, message, code, param=param)


def busy(message: str) -> Fault:
    """There is too much to do."""
    return Fault(429, message, "queue_full", retry_after=1)


def unavailable(message: str, code: str = "no_instance") -> Fault:
    """Nobody can take the request now."""
    return Fault(503, message, code, retry_after=2)
