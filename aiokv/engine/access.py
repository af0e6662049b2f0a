"""Who may reach an engine's control channel: keys, certificates, or everybody if asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiokv.control.address import Address
from aiokv.control.keys import Keys, checked_key
from aiokv.control.tls import Tls

__all__ = ["Access", "checked_access"]


@dataclass(frozen=True, slots=True)
class Access:
    """What an engine was told of those who may connect."""

    keys: Keys | None
    #: Public keys, or fingerprints of certificates; None: whoever the certificates' authority vouches for.
    allow: tuple[str, ...] | None
    tls: Tls | None

    @property
    def strangers(self) -> bool:
        """Whether anybody can connect."""
        return self.keys is None and (self.tls is None or not self.tls.mutual)


def checked_access(
    bind: str, keys: Keys | None, allow: Sequence[str] | None, tls: Tls | None, *, insecure: bool
) -> Access:
    """Refuse what doesn't go together, and an address that strangers on other hosts could reach.

    Args:
        bind: The address, well formed.
        keys: The engine's own.
        allow: Those of its peers.
        tls: Certificates.
        insecure: Strangers may reach it.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: Something doesn't go together, or the address needs keys.
    """
    if keys is not None and not isinstance(keys, Keys):
        raise TypeError(f"keys is a pair of Keys, not {type(keys).__name__}")
    if tls is not None and not isinstance(tls, Tls):
        raise TypeError(f"tls is a Tls, not {tls!r}")
    if allow is not None and (isinstance(allow, str) or not isinstance(allow, Sequence)):
        raise TypeError(f"allow is a list of keys, not {allow!r}")
    listed = None if allow is None else tuple(checked_key(each) for each in allow)
    scheme = bind.partition("://")[0]
    if tls is not None and scheme != "tls":
        raise ValueError(f"bind {bind!r}: tls= is for tls://host:port")
    if tls is None and scheme == "tls":
        raise ValueError(f"bind {bind!r}: pass tls=, the certificates")
    if keys is not None and scheme != "tcp":
        raise ValueError(f"bind {bind!r}: keys= are for tcp://host:port")
    if scheme != "tls" and (keys is None) != (not listed):
        raise ValueError("keys= is this engine's own, allow= lists those of its peers: one needs the other")
    access = Access(keys, listed, tls)
    if access.strangers and not insecure and not Address.parse(bind, scheme).loopback:
        raise ValueError(
            f"bind {bind!r} can be reached from other hosts, where anybody could use this engine: pass "
            "keys= and allow= (python -m aiokv keygen makes keys), or tls= for tls://, or insecure=True "
            "on a network where everybody is trusted"
        )
    return access
