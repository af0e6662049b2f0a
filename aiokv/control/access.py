"""Who may reach an engine's control channel: keys, certificates, or everybody if asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiokv.control.address import Address
from aiokv.control.keys import Keys, checked_key
from aiokv.control.tls import Tls

__all__ = ["ARGUMENTS", "Access", "Names", "checked_access", "checked_reach"]


class Names(NamedTuple):
    """What the arguments are called in messages: whoever reads a configuration passes none."""

    keys: str = "keys="
    allow: str = "allow="
    tls: str = "tls="
    insecure: str = "insecure=True"
    advertise: str = "advertise="


ARGUMENTS = Names()


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
    bind: str,
    keys: Keys | None,
    allow: Sequence[str] | None,
    tls: Tls | None,
    *,
    insecure: bool,
    advertise: str | None = None,
    names: Names = ARGUMENTS,
) -> Access:
    """Refuse what doesn't go together, and addresses as ``checked_reach`` does.

    Args:
        bind: The address, well formed.
        keys: The engine's own.
        allow: Those of its peers.
        tls: Certificates.
        insecure: Strangers may reach it.
        advertise: What peers are told, well formed.
        names: What messages call these.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: Something doesn't go together, a secret key is listed, or the address needs keys.
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
        raise ValueError(f"bind {bind!r}: {names.tls} is for tls://host:port")
    if tls is None and scheme == "tls":
        raise ValueError(f"bind {bind!r}: pass {names.tls}, the certificates")
    if keys is not None and scheme != "tcp":
        raise ValueError(f"bind {bind!r}: {names.keys} are for tcp://host:port")
    if scheme != "tls" and (keys is None) != (not listed):
        raise ValueError(
            f"{names.keys} is this engine's own, {names.allow} lists those of its peers: one needs the other"
        )
    if keys is not None and listed is not None and keys.secret in listed:
        raise ValueError(f"{names.allow} lists this engine's secret key; lists have public ones")
    access = Access(keys, listed, tls)
    checked_reach(bind, advertise, known=insecure or not access.strangers, names=names)
    return access


def checked_reach(bind: str, advertise: str | None, *, known: bool, names: Names = ARGUMENTS) -> None:
    """Refuse an address that strangers on other hosts could reach, and one that no peer could, at once.

    Args:
        bind: The address, well formed.
        advertise: What peers are told in its place, well formed.
        known: It is said who may reach it.
        names: What messages call these.

    Raises:
        ValueError: It is such an address.
    """
    here = Address.parse(bind, bind.partition("://")[0])
    faults = []
    if not known and not here.loopback:
        faults.append(
            f"can be reached from other hosts, where anybody could use this engine: pass {names.keys} and "
            f"{names.allow} (python -m aiokv keygen makes keys), or {names.tls} for tls://, or "
            f"{names.insecure} on a network where everybody is trusted"
        )
    if here.any_host and advertise is None:
        faults.append(f"is no address that a peer can reach: pass {names.advertise} one that is")
    if faults:
        raise ValueError(f"bind {bind!r} {'; and it '.join(faults)}")
