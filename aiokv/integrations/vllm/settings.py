"""What ``kv_connector_extra_config`` may say, checked at start."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from aiokv.config import Config
from aiokv.control.address import canonical
from aiokv.engine.arguments import seconds, whole
from aiokv.offload.policies import policy_named
from aiokv.offload.settings import size_of
from aiokv.offload.sharing.door import checked_path

__all__ = ["ConnectorSettings", "Registration"]

#: Seconds; see ``ConnectorSettings``.
_HOLD, _HOLD_AT_MOST = 30.0, 600.0

_OWN = (
    "hold",
    "hold_at_most",
    "load_timeout",
    "decode_ranks",
    "model",
    "router",
    "host_tier",
    "host_tier_policy",
    "host_pool",
    "layerwise",
    "chunks",
)


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an instance makes itself known to aiokv's router, in the field ``router``.

    Attributes:
        address: Control address of the router.
        role: ``prefill`` or ``decode``.
        http: ``http://host:port`` of this instance's own server.
        models: Names that requests may use, as vLLM serves them.
        bind: Where the router's answers come in.
    """

    address: str
    role: Literal["prefill", "decode"]
    http: str
    models: tuple[str, ...]
    bind: str = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How the connector is set up.

    Attributes:
        engine: How the transfer engine of each rank is; its fields stand beside these, under their names.
        hold: Seconds for which the prefill side keeps what nobody fetches, or says that it will.
        hold_at_most: Seconds for which it keeps what somebody says that it will fetch, or is fetching.
        load_timeout: Seconds that a load may take in all, waiting for the prefill side included.
        decode_ranks: Ranks of an instance that fetches from this one; None: as many as this one has.
        model: Compared for equality between the two sides, besides what is found out about the model.
        router: How this instance makes itself known to a router; None: it doesn't.
        host_tier: Bytes of host memory in which all ranks together keep blocks; None: they keep none.
        host_tier_policy: What goes first there: ``"lru"`` or ``"arc"``.
        host_pool: Where a pool of this host is that its instances share, in place of a tier of their own.
        layerwise: The prefill side sends layers while it still computes those behind them.
        chunks: The prefill side sends chunks of a prompt while it still computes those behind them, where the
            decode side waits for them.
    """

    engine: Config
    hold: float = _HOLD
    hold_at_most: float = _HOLD_AT_MOST
    load_timeout: float = 60.0
    decode_ranks: int | None = None
    model: str = ""
    router: Registration | None = None
    host_tier: int | None = None
    host_tier_policy: str = "lru"
    host_pool: str | None = None
    layerwise: bool = False
    chunks: bool = True

    @classmethod
    def read(cls, extra: Mapping[str, object]) -> ConnectorSettings:
        """What stands in ``kv_connector_extra_config``.

        Raises:
            TypeError: A field of the wrong kind; the message names it.
            ValueError: There is no such field, or it can't be meant.
        """
        known = (*_OWN, *Config.__struct_fields__)
        for name in extra:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; {near[0]!r} is meant, perhaps" if near else f"; there are {', '.join(known)}"
                raise ValueError(f"kv_connector_extra_config has no field {name!r}{hint}")
        own = {name: extra[name] for name in _OWN if name in extra}
        checks: dict[str, Callable[[Any], object]] = {
            **dict.fromkeys(("hold", "hold_at_most", "load_timeout"), partial(seconds, what="it")),
            "model": partial(_of, str, "a text"),
            **dict.fromkeys(("layerwise", "chunks"), partial(_of, bool, "true or false")),
            "host_tier_policy": policy_named,
        }
        for name, check in checks.items():
            if name in own:
                _named(name, check, own[name])
        _check_holds(own)
        reads: dict[str, Callable[[Any], object]] = {
            "decode_ranks": lambda value: whole(value, "it", 1),
            "router": _registration,
            "host_tier": lambda value: size_of(value, "it"),
            "host_pool": lambda value: _pool(value, own),
        }
        for name, read in reads.items():
            if own.get(name) is not None:
                own[name] = _named(name, read, own[name])
        engine = Config(**{name: value for name, value in extra.items() if name not in _OWN})  # type: ignore[arg-type]
        return cls(engine=engine, **own)  # type: ignore[arg-type]

    @property
    def keeps(self) -> bool:
        """Whether blocks are kept in host memory, of whosever."""
        return self.host_tier is not None or self.host_pool is not None

    def at_rank(self, rank: int) -> Config:
        """The engine of one rank: where a port is given, rank 0 has it and the others those behind it."""
        if rank == 0 or _port(self.engine.bind) == 0:
            return self.engine
        bind, told = behind(canonical(self.engine.bind), rank), self.engine.advertise
        return msgspec.structs.replace(
            self.engine, bind=bind, advertise=told and (behind(told, rank) if _port(told) else told)
        )

    def registered(self, address: str, ranks: int) -> list[str]:
        """Addresses of all ranks, by that of rank 0.

        Raises:
            ValueError: They can't be known, as ``bind`` has no port.
        """
        if ranks > 1 and _port(self.engine.bind) == 0:
            raise ValueError(
                "kv_connector_extra_config: router: an instance of several ranks needs a bind with a port, "
                'such as "tcp://127.0.0.1:7100", so that rank 0 knows where the others are'
            )
        return [behind(address, rank) for rank in range(ranks)]


def behind(address: str, count: int) -> str:
    """The same address, so many ports further."""
    where, mark, key = address.partition("#")
    host, _, port = where.rpartition(":")
    return f"{host}:{int(port) + count}{mark}{key}"


def _port(bind: str) -> int:
    return int(canonical(bind).rpartition(":")[2])


def _check_holds(own: dict[str, Any]) -> None:
    hold = own.get("hold", _HOLD)
    most = own.setdefault("hold_at_most", max(hold, _HOLD_AT_MOST))
    if most < hold:
        raise ValueError(f"kv_connector_extra_config: hold_at_most={most} is less than hold={hold}")


def _registration(value: object) -> Registration:
    try:
        return msgspec.convert(value, Registration)
    except msgspec.ValidationError as error:  # a ValueError, too
        raise ValueError(str(error)) from error


def _pool(value: object, others: Mapping[str, object]) -> str:
    for name, option in (("host_tier", "--capacity"), ("host_tier_policy", "--policy")):
        if others.get(name) is not None:
            raise ValueError(
                f"{name} can't be had beside it, as the pool has its own: drop one of the two ({option} of "
                "python -m aiokv pool says it for the pool)"
            )
    _of(str, "a path", value)
    return checked_path(value)  # type: ignore[arg-type]


def _of(kind: type, words: str, value: object) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"it is {words}, not {value!r}")


def _named(name: str, check: Callable[[Any], object], value: object) -> object:
    try:
        return check(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"kv_connector_extra_config: {name}: {error}") from error
