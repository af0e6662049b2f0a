"""``kv_transfer_params``: what routers carry from the prefill side to the decode side.

Two shapes are understood. In NIXL's the prefill side answers with everything that the decode side needs, and
the router carries it over. In Mooncake's the router mints a ``transfer_id``, tells it to both sides at once,
and names the prefill side's address to the decode side; or the decode side's to the prefill side, which
pushes. Never are vLLM's request ids used as ids of transfers: each engine makes its own (vllm#42839).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiokv.engine.arguments import checked_addresses, checked_id, seconds, whole
from aiokv.integrations.vllm.orders import Ticket

__all__ = ["Pull", "answer", "minted", "pull_of", "readers"]

Params = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Pull:
    """What a request on the decode side is to fetch.

    Attributes:
        ticket: Names the transfer.
        sources: Addresses of the prefill side's ranks; empty: they name this side.
        tokens: Tokens that are offered; None: as many as the prompt has.
        parts: How many of them name this side, where there are no sources.
        hold: Seconds for which it is held for who says nothing; None: the prefill side didn't say.
    """

    ticket: Ticket
    sources: tuple[str, ...]
    tokens: int | None
    parts: int = 1
    hold: float | None = None


def answer(
    ticket: Ticket, sources: Sequence[str], tokens: int, engine: str, hold: float
) -> dict[str, object]:
    """What the prefill side answers, for the decode side to read."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": ticket.transfer,
        "attempt": ticket.attempt,
        "remote_addresses": list(sources),
        "remote_engine_id": engine,
        "remote_tokens": tokens,
        "remote_hold": hold,
        "tp_size": len(sources),
    }


def minted(params: Params) -> Ticket | None:
    """The transfer that a router named; None where it named none.

    Raises:
        TypeError: ``transfer_id``, ``attempt`` or ``deadline`` is of the wrong kind.
        ValueError: One can't be meant.
    """
    given: dict[str, Any] = dict(params)
    if given.get("transfer_id") is None:
        return None
    deadline = given.get("deadline")
    if deadline is not None:
        seconds(deadline)
    attempt = whole(given.get("attempt", 0), "attempt")
    return Ticket(checked_id(given["transfer_id"]), attempt, deadline)


def pull_of(params: Params) -> Pull | None:
    """What the decode side is to fetch; None where it is nothing.

    Raises:
        TypeError: A parameter of the wrong kind.
        ValueError: One is missing or can't be meant; the message names it.
    """
    if not params.get("do_remote_prefill"):
        return None
    ticket = minted(params)
    if ticket is None:
        raise ValueError("kv_transfer_params has no transfer_id")
    tokens = params.get("remote_tokens")
    found = None if tokens is None else whole(tokens, "remote_tokens")  # type: ignore[arg-type]
    hold: Any = params.get("remote_hold")
    if hold is not None:
        seconds(hold, "remote_hold")
    if params.get("push"):
        return Pull(ticket, (), found, _ranks(params), hold)
    return Pull(ticket, tuple(_sources(params)), found, hold=hold)


def readers(params: Params) -> tuple[str, ...]:
    """Whom the prefill side pushes to; empty where it is to be asked.

    Raises:
        TypeError, ValueError: ``remote_addresses`` can't be meant.
    """
    if not params.get("push"):
        return ()
    found = checked_addresses(params.get("remote_addresses"), "remote_addresses")  # type: ignore[arg-type]
    if not found:
        raise ValueError("remote_addresses names nobody to push to")
    return tuple(found)


def _sources(params: Params) -> list[str]:
    addresses = params.get("remote_addresses")
    if addresses is not None:
        found = checked_addresses(addresses, "remote_addresses")  # type: ignore[arg-type]
        if not found:
            raise ValueError("remote_addresses names no engine")
        return found
    if "remote_bootstrap_addr" in params:
        given = str(params["remote_bootstrap_addr"])
        parts = urlsplit(given if "://" in given else f"//{given}")
        host, port = parts.hostname, parts.port
    else:
        host, port = params.get("remote_host"), params.get("remote_port")  # type: ignore[assignment]
    if not host or port is None:
        raise ValueError(
            "kv_transfer_params name no prefill side: neither remote_addresses, nor remote_host with "
            "remote_port, nor remote_bootstrap_addr"
        )
    # The ranks of an instance take ports in a row, see settings.py.
    return [f"tcp://{host}:{whole(port, 'remote_port', 1) + rank}" for rank in range(_ranks(params))]


def _ranks(params: Params) -> int:
    return whole(params.get("tp_size", 1), "tp_size", 1)  # type: ignore[arg-type]
