"""A client's request: what the router has to know of it, and what goes on to the instances.

The body goes on as it came, field by field, also what the router doesn't know; what it sets is named here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from aiokv.router.faults import bad

__all__ = ["Asked", "read"]

#: Under this name the instances are told of the transfer.
PARAMS = "kv_transfer_params"

_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)


class _Message(msgspec.Struct, gc=False):
    """What each message has to have."""

    role: str


# Whole types, so that no Python runs for each message or token while the loop waits.
_MESSAGES = msgspec.json.Decoder(list[_Message])
_TEXTS = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[str]))
_TOKENS = msgspec.json.Decoder(list[int])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])

#: Fields of a request whose answer is one token that nobody reads.
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
#: Fields that make no sense, or would be refused, beside those.
_LEFT_OUT = ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be meant, as far as the router can tell.

    Attributes:
        fields: The body, each value as it came.
        chat: Whether it is a chat's.
        model: Which model is to answer.
        stream: Whether the answer comes in pieces.
        tokens: How many tokens the prompt has; 0 where only an instance can tell.
    """

    fields: dict[str, msgspec.Raw]
    chat: bool
    model: str
    stream: bool
    tokens: int

    @property
    def prompt(self) -> bytes:
        """The prompt or the messages, as JSON; a copy, so that none is held beside the body."""
        return bytes(self.fields[_prompt_name(self.chat)])

    def for_prefill(self, params: dict[str, object]) -> bytes:
        """Body for the prefill instance: the same, up to the first token."""
        body: dict[str, object] = {name: self.fields[name] for name in self.fields if name not in _LEFT_OUT}
        for name, value in _ONE_TOKEN.items():
            if name in body or name != "max_completion_tokens":
                body[name] = value
        body[PARAMS] = params
        return msgspec.json.encode(body)

    def for_decode(self, params: dict[str, object]) -> bytes:
        """Body for the decode instance."""
        return msgspec.json.encode({**self.fields, PARAMS: params})


def read(body: bytes, *, chat: bool) -> Asked:
    """Read a request's body.

    Raises:
        Fault: It can't be meant; the fault names the field.
    """
    try:
        fields = _OBJECT.decode(body)
    except _MALFORMED as error:
        raise bad(f"the body is not a JSON object: {error}", code="invalid_json") from None
    model = _field(fields, "model", str, "a string")
    if model is None:
        raise bad("model is missing", "model", "missing_required_parameter")
    stream = _field(fields, "stream", bool | None, "true or false")
    for name in ("max_tokens", "max_completion_tokens"):
        limit = _field(fields, name, int | None, "a whole number")
        if limit is not None and limit < 1:
            raise bad(f"{name} is at least 1, not {limit}", name)
    name = _prompt_name(chat)
    if name not in fields:
        raise bad(f"{name} is missing", name, "missing_required_parameter")
    check = _checked_messages if chat else _checked_prompt
    return Asked(
        fields=fields,
        chat=chat,
        model=model,
        stream=bool(stream),
        tokens=check(fields[name]),
    )


def _prompt_name(chat: bool) -> str:
    return "messages" if chat else "prompt"


def _field(
    fields: dict[str, msgspec.Raw],
    name: str,
    kind: Any,  # noqa: ANN401 (a type, also a union)
    words: str,
) -> Any:  # noqa: ANN401 (of that type)
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except _MALFORMED:
        raise bad(f"{name} must be {words}", name, "invalid_type") from None


def _checked_messages(prompt: msgspec.Raw) -> int:
    try:
        messages = _MESSAGES.decode(prompt)
    except _MALFORMED:
        raise bad(
            "messages must be a list of objects, each with a role", "messages", "invalid_type"
        ) from None
    if not messages:
        raise bad("messages is empty", "messages", "empty_array")
    return 0


def _checked_prompt(prompt: msgspec.Raw) -> int:
    """How many tokens it has, where it is given as tokens."""
    for texts in _TEXTS:
        with suppress(*_MALFORMED):
            if texts.decode(prompt) or texts.type is str:
                return 0
    with suppress(*_MALFORMED):
        if tokens := _TOKENS.decode(prompt):
            return len(tokens)
    with suppress(*_MALFORMED):
        if lists := _TOKEN_LISTS.decode(prompt):
            return max(map(len, lists))
    raise bad("prompt must be a string, tokens, or a list of those", "prompt", "invalid_type")
