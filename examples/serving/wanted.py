"""What a server of the examples understands of a request in OpenAI's form; the rest is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from serving.model import Tokenizer

__all__ = ["Refused", "Wanted", "read"]

#: Fields that change nothing of what is answered here, or only by the values that are the usual ones.
_IGNORED = frozenset({"model", "user", "seed", "metadata", "store", "service_tier"})
_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "temperature": (0,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "logprobs": (False,),
}
_TAKEN = frozenset(
    {"messages", "prompt", "max_tokens", "max_completion_tokens", "stream", "stream_options", "stop"}
)
_USUAL_LIMIT = 64


class Refused(ValueError):
    """The request can't be answered; says which field is why."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Wanted:
    """A request, as the model sees it."""

    tokens: list[int]
    limit: int
    stream: bool
    usage: bool  # also in a stream
    stop: tuple[str, ...]
    transfer: str
    attempt: int
    #: Seconds that are left.
    deadline: float
    #: Transfer engines that have the KV; empty for whoever computes it.
    sources: tuple[str, ...]


def read(body: object, *, chat: bool, tokenizer: Tokenizer, context: int, vocabulary: int) -> Wanted:
    """Take a request apart.

    Args:
        body: As JSON has it.
        chat: Whether it is a chat's.
        tokenizer: Of the model.
        context: Tokens of prompt and answer, at most.
        vocabulary: How many tokens the model knows.

    Raises:
        Refused: It has what isn't supported here, or can't be meant.
    """
    if not isinstance(body, dict):
        raise Refused("the body is an object")
    _check_fields(body)
    params = body.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise Refused("kv_transfer_params is missing: this server is behind a router", "kv_transfer_params")
    tokens = _messages(body, tokenizer) if chat else _prompt(body, tokenizer, vocabulary)
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or _USUAL_LIMIT
    if type(limit) is not int or limit < 1:
        raise Refused(f"max_tokens is a whole number from 1 on, not {limit!r}", "max_tokens")
    if len(tokens) + limit > context:
        raise Refused(
            f"{len(tokens)} tokens and {limit} of answer are more than the context of {context}",
            "messages" if chat else "prompt",
        )
    options = body.get("stream_options") or {}
    return Wanted(
        tokens=tokens,
        limit=limit,
        stream=body.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        stop=_stop(body.get("stop")),
        **_transfer(params),
    )


def _check_fields(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if name in _ONLY:
            if value is not None and value not in _ONLY[name]:
                raise Refused(f"{name}={value!r} is not supported: answers are the likeliest ones", name)
        elif (
            name not in _TAKEN and name not in _IGNORED and name != "kv_transfer_params" and value is not None
        ):
            raise Refused(f"{name} is not supported", name)


def _messages(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    turns = []
    for message in body.get("messages", ()):
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [
            part["text"]
            for part in parts
            if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(parts):
            raise Refused("messages: only text is supported", "messages")
        turns.append({"role": str(message.get("role")), "content": "".join(texts)})
    if not turns:
        raise Refused("messages is empty", "messages")
    return tokenizer.turns(turns)


def _prompt(body: dict[str, Any], tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, list) or not tokens or not all(type(each) is int for each in tokens):
        raise Refused("prompt is one text, or the tokens of one", "prompt")
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise Refused(f"prompt: tokens are from 0 to {vocabulary - 1}", "prompt")
    return tokens


def _stop(stop: object) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(found, list)
        or len(found) > 4
        or not all(isinstance(one, str) and one for one in found)
    ):
        raise Refused("stop is a text, or up to four of them", "stop")
    return tuple(found)


def _transfer(params: dict[str, Any]) -> dict[str, Any]:
    transfer, attempt = params.get("transfer_id"), params.get("attempt", 0)
    deadline, sources = params.get("deadline", 60.0), params.get("remote_addresses", [])
    good = (
        isinstance(transfer, str)
        and transfer
        and type(attempt) is int
        and isinstance(deadline, int | float)
        and math.isfinite(deadline)
        and isinstance(sources, list)
        and all(isinstance(each, str) for each in sources)
    )
    if not good:
        raise Refused("kv_transfer_params is malformed", "kv_transfer_params")
    return {"transfer": transfer, "attempt": attempt, "deadline": float(deadline), "sources": tuple(sources)}
