"""Tokens into text, and text into answers in OpenAI's form."""

from __future__ import annotations

import json
import time
from typing import Any

from serving.model import Tokenizer

__all__ = ["Answer", "Text"]


class Text:
    """The text of an answer as its tokens come.

    Args:
        tokenizer: Makes the text.
        stop: What ends the answer, and isn't part of it.

    Attributes:
        whole: All that may be shown so far.
        ended: A stop was met.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self.whole = ""
        self.ended = False

    def add(self, token: int, *, last: bool = False) -> str:
        """Take a token; gives what is new and can be shown.

        Args:
            token: The next one.
            last: No more come, so nothing is held back.
        """
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        met = [at for at in map(text.find, self._stop) if at >= 0]
        if met:
            self.ended, text = True, text[: min(met)]
        elif not last:
            # A character may take several tokens, and decodes to U+FFFD until it is complete.
            text = text.rstrip("\ufffd")
            text = text[: len(text) - self._held(text)]
        new = text[len(self.whole) :]
        self.whole += new
        return new

    def _held(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop."""
        most = max(map(len, self._stop), default=1) - 1
        return next(
            (size for size in range(most, 0, -1) if any(one.startswith(text[-size:]) for one in self._stop)),
            0,
        )


class Answer:
    """The form of one answer.

    Args:
        name: Of the transfer, which names the answer, too.
        model: As asked for.
        chat: Whether it is a chat's.
        prompt: Tokens of the prompt.
    """

    def __init__(self, name: str, model: str, *, chat: bool, prompt: int) -> None:
        self._chat, self._prompt = chat, prompt
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + name,
            "created": int(time.time()),  # noqa: TID251 - the protocol wants the wall clock
            "model": model,
        }
        self._first = True

    def whole(self, text: str, reason: str, tokens: int) -> dict[str, Any]:
        """All of it."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **said}],
            "usage": self._usage(tokens),
        }

    def piece(self, text: str, reason: str | None = None) -> bytes:
        """One event of a stream."""
        if self._chat:
            delta = {"content": text} if text or reason is None else {}
            said: dict[str, Any] = {"delta": {"role": "assistant", **delta} if self._first else delta}
        else:
            said = {"text": text}
        self._first = False
        return self._event([{"index": 0, "finish_reason": reason, "logprobs": None, **said}])

    def usage(self, tokens: int) -> bytes:
        """The event that tells how many tokens there were."""
        return self._event([], usage=self._usage(tokens))

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return (
            b"data: "
            + json.dumps({**self._head, "object": kind, "choices": choices, **more}).encode()
            + b"\n\n"
        )

    def _usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": tokens,
            "total_tokens": self._prompt + tokens,
        }
