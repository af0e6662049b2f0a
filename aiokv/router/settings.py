"""Bounds and times of a router."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

__all__ = ["RouterSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What a router allows.

    Attributes:
        body: Bytes of a request, at most; more is answered with 413.
        concurrency: Requests that instances work on at once.
        queue: Requests that wait for those, at most; more are answered with 429.
        instances: Instances, at most.
        deadline: Seconds that a request may take where the client doesn't say; also the most it may say.
        first_token: Seconds until the first token; then it is tried elsewhere once.
        between_tokens: Seconds from one piece of a stream to the next, and that a client may take for one.
        receive: Seconds that a client may take to send its request.
        connect: Seconds that connecting to an instance may take.
        answer: Bytes of an answer that is no stream, at most.

    Raises:
        TypeError: A field is no number.
        ValueError: A field is not above 0 (``queue`` may be 0).
    """

    body: int = 8 << 20
    concurrency: int = 1024
    queue: int = 1024
    instances: int = 1024
    deadline: float = 600.0
    first_token: float = 60.0
    between_tokens: float = 30.0
    receive: float = 30.0
    connect: float = 2.0
    answer: int = 64 << 20

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kinds = (int,) if each.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"{each.name} is a number ({each.type}), not {value!r}")
            if not math.isfinite(value) or value < (0 if each.name == "queue" else 1e-9):
                raise ValueError(f"{each.name}={value}: it must be above 0")
