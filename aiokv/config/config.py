"""How an engine is set up, under the same names in Python, in TOML, in the environment and in JSON.

    aiokv.Config(bind="tcp://10.0.0.5:7000", transports=["shm", "tcp"], liveness="5s")

    [aiokv]                                             # Config.from_toml("engine.toml")
    bind = "tcp://10.0.0.5:7000"
    transports = ["shm", "tcp"]
    liveness = "5s"

    AIOKV_BIND=tcp://10.0.0.5:7000 AIOKV_TRANSPORTS=shm,tcp AIOKV_LIVENESS=5s     # Config.from_env()

``config.engine(cache)`` makes the engine, and reads keys and certificates from where the fields say
that they are: nothing secret stands in a configuration. Files and variables are read only when asked
for: an engine that is made without a ``Config`` looks at none. What can't be meant is refused at
once, with the name of the field, and of the file or variable where it stands.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aiokv.config.fields import BYTES, COUNTS, DURATIONS, READ, TLS, from_text
from aiokv.control.access import Names, checked_access, checked_reach
from aiokv.control.address import well_formed
from aiokv.control.choice import checked_binding
from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.device.cache import KVCache
from aiokv.engine.choices import checked_ports, checked_transports
from aiokv.engine.engine import TransferEngine
from aiokv.engine.stopwatch import Trace
from aiokv.proto.settings import SECOND, Settings
from aiokv.transports.handshake import STREAMS

__all__ = ["Config"]

_PREFIX = "AIOKV_"
_DEFAULT = Settings()
#: What messages call what an engine is told.
_FIELDS = Names("keys", "allow", "tls_certificate, tls_key and tls_ca", "insecure = true", "advertise =")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything that an engine is told but for its cache; see ``TransferEngine`` and ``Settings``.

    Times are seconds, or text with a unit: ``2``, ``0.5``, ``"500ms"``, ``"2s"``, ``"1min"``. Sizes
    are bytes, or text with a unit: ``2097152``, ``"2MiB"``, ``"2MB"``. They are kept as seconds and
    as bytes.

    Attributes:
        bind: Address of the control channel; port 0 takes a free one.
        advertise: What peers are told instead of the bound address.
        keys: File, or folder of ``python -m aiokv keygen``, with this engine's own secret key.
        allow: Public keys of the peers; or the file, or folder, that lists them; with TLS,
            fingerprints of their certificates.
        tls_certificate: File with this engine's certificate, for ``tls://``.
        tls_key: File with the private key of that.
        tls_ca: File with the certificates of those who vouch for peers.
        insecure: Let ``bind`` be reached from other hosts by whoever is there.
        transports: Names of the data paths that may be used, best first; None: all that fit.
        data_ports: Ports that data connections may come in at, at least one for each of ``tcp`` and
            ``nccl``; none: any that is free. Text may give a range: ``"7000-7009"``.
        tcp_streams: Connections of each ``tcp`` link.
        contact: How long a peer may take to answer at first contact.
        heartbeat: How often peers with a live part in common ask each other for a sign of life.
        liveness: Silence after which such a peer is given up.
        lease: How long a one-sided reader may read on without hearing that it still may.
        drain: After a part was given up: how long until nothing can touch its blocks any more.
        close: On closing: how long to wait until peers acknowledged the last message.
        tombstone: How long an ended transfer is remembered.
        tombstones: Ended transfers remembered at most.
        parked_per_peer: Grants and offers of one peer that wait for their other half, at most.
        peers: Peers at most.
        chunk: Bytes that one submitted copy moves at most.
        window: Bytes of submitted copies that may be unfinished.
        staging: Of a cache on a GPU: pinned memory that each ``shm`` and ``tcp`` link has at each end.
        pinned: Of a cache on a GPU: what all ``shm`` links have of that at most, and all ``tcp`` links.
        nccl_staging: Memory of the GPU that all ``nccl`` links share, for each direction.

    Raises:
        TypeError: A field of the wrong kind; the message names it.
        ValueError: One that can't be meant, or fields that contradict each other.
    """

    bind: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    keys: str | None = None
    allow: Sequence[str] | str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    insecure: bool = False
    transports: Sequence[str] | None = None
    data_ports: Sequence[int] | str = ()
    tcp_streams: int = STREAMS
    contact: float | str = _DEFAULT.contact_ns / SECOND
    heartbeat: float | str = _DEFAULT.heartbeat_ns / SECOND
    liveness: float | str = _DEFAULT.liveness_ns / SECOND
    lease: float | str = _DEFAULT.lease_ns / SECOND
    drain: float | str = _DEFAULT.drain_ns / SECOND
    close: float | str = _DEFAULT.close_ns / SECOND
    tombstone: float | str = _DEFAULT.tombstone_ns / SECOND
    tombstones: int = _DEFAULT.tombstones
    parked_per_peer: int = _DEFAULT.parked_per_peer
    peers: int = _DEFAULT.peers
    chunk: int | str = _DEFAULT.chunk_bytes
    window: int | str = _DEFAULT.window_bytes
    staging: int | str = _DEFAULT.staging_bytes
    pinned: int | str = _DEFAULT.pinned_bytes
    nccl_staging: int | str = _DEFAULT.nccl_staging_bytes

    def __post_init__(self) -> None:
        """Bring all fields into the form in which they are kept, and refuse what can't be meant."""
        for name in self.__struct_fields__:
            if (read := READ.get(name)) is not None:
                msgspec.structs.force_setattr(self, name, read(name, getattr(self, name)))
        checked_binding(self.bind, self.advertise)
        files = [getattr(self, name) for name in TLS]
        if None in files and any(files):
            raise ValueError(f"{', '.join(TLS)} go together")
        if self.advertise is None and well_formed(self.bind, None, self.bind.partition("://")[0])[0].any_host:
            checked_reach(
                self.bind, None, known=bool(self.keys or any(files) or self.insecure), names=_FIELDS
            )
        _settings(self)

    @property
    def settings(self) -> Settings:
        """The timers and bounds."""
        return _settings(self)

    def engine(self, cache: KVCache, *, trace: Trace | None = None) -> TransferEngine:
        """An engine so set up, not yet entered.

        Reads the files of keys and certificates that it needs: not for a running loop.

        Args:
            cache: The registered memory.
            trace: Records what its transfers do.

        Raises:
            OSError: A file can't be read, or is open to others.
            ValueError: A file has something else in it, ``bind`` can be reached from other hosts
                and nothing says who may, or no transport can serve the cache.
        """
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is a KVCache, not {cache!r}")
        with self._named("allow"):
            allow = Keys.listed(self.allow) if isinstance(self.allow, str) else self.allow
        with self._named("keys"):
            keys = None if self.keys is None else Keys.load(self.keys)
        tls = self._tls()
        with self._named("bind", "keys", "allow"):
            checked_access(
                self.bind, keys, allow, tls,
                insecure=self.insecure, advertise=self.advertise, names=_FIELDS,
            )  # fmt: skip
        with self._named("transports", "data_ports"):
            chosen = checked_transports(self.transports, cache.device.kind)
            checked_ports(self.data_ports, chosen)  # type: ignore[arg-type]
        return TransferEngine(
            cache,
            bind=self.bind,
            advertise=self.advertise,
            keys=keys,
            allow=allow,
            tls=tls,
            insecure=self.insecure,
            transports=self.transports,
            data_ports=checked_ports(self.data_ports),  # type: ignore[arg-type]
            tcp_streams=self.tcp_streams,
            settings=self.settings,
            trace=trace,
        )

    def _tls(self) -> Tls | None:
        """The certificates, if there are any."""
        certificate, key, ca = self.tls_certificate, self.tls_key, self.tls_ca
        if certificate is None or key is None or ca is None:
            return None
        try:
            return Tls.load(certificate, key, ca=ca)
        except (OSError, ValueError) as error:
            text = str(error) if error.args[1:] == () else str(error.args[1])
            with self._named(f"tls_{text.partition(':')[0]}"):
                raise

    @contextlib.contextmanager
    def _named(self, *fields: str) -> Iterator[None]:
        """Errors within name the field, or those of them that the message is about, and where they stand."""
        try:
            yield
        except (OSError, TypeError, ValueError) as error:
            places = self.__dict__.get("places", {})
            about = [
                places[each] for each in fields if each in places and re.search(rf"\b{each}\b", str(error))
            ]
            place = ", ".join(about) or places.get(fields[0], fields[0])
            if isinstance(error, OSError) and error.errno is not None:
                raise type(error)(error.errno, f"{place}: {error.strerror}", error.filename) from error
            raise type(error)(f"{place}: {error}") from error

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], base: Config | None = None) -> Config:
        """Read the table ``[aiokv]`` of a file. Blocks: not for a running loop.

        Args:
            path: The file.
            base: What the fields are that don't stand there; by default their defaults.

        Raises:
            OSError: It can't be read.
            ValueError: It is no TOML, has no such table, or something in it can't be meant.
        """
        import tomllib

        where = os.fspath(path)
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: {error}") from error
        table = tables.get("aiokv")
        if table is None or not hasattr(table, "items"):
            raise ValueError(f"{where}: there is no table [aiokv]")
        return cls.from_mapping(table, base, source=where)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, base: Config | None = None) -> Config:
        """Read the variables ``AIOKV_BIND``, ``AIOKV_TRANSPORTS=shm,tcp`` and so on, and change none.

        Args:
            environ: The variables; by default those of this process.
            base: What the fields are that have no variable, such as what a file says.

        Raises:
            ValueError: A variable that begins so and is none of a field's, or that can't be meant.
        """
        found = os.environ if environ is None else environ
        values = {name: value for name, value in found.items() if name.startswith(_PREFIX)}
        return _updated(
            base or cls(),
            {
                (field := name.removeprefix(_PREFIX).lower()): from_text(name, field, value)
                for name, value in values.items()
            },
            lambda field: _PREFIX + field.upper(),
        )

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], base: Config | None = None, *, source: str = "config"
    ) -> Config:
        """Take fields from what was read elsewhere: JSON, another program's configuration.

        Args:
            mapping: Values by field.
            base: What the other fields are.
            source: What errors call it.

        Raises:
            TypeError: It is no mapping.
            ValueError: A field that there isn't, or that can't be meant.
        """
        if not isinstance(mapping, Mapping):
            raise TypeError(f"{source} is a mapping of fields to values, not {mapping!r}")
        return _updated(base or cls(), mapping, lambda field: f"{source}: {field}")


def _settings(config: Config) -> Settings:
    """The timers and bounds; raises ValueError where they contradict each other."""
    numbers = {f"{name}_ns": round(getattr(config, name) * SECOND) for name in DURATIONS}
    numbers |= {f"{name}_bytes": getattr(config, name) for name in BYTES}
    numbers |= {name: getattr(config, name) for name in COUNTS}
    try:
        return Settings(**numbers)
    except ValueError as error:
        raise ValueError(_in_seconds(str(error))) from error


def _in_seconds(text: str) -> str:
    """What ``Settings`` says, in the names and units of a ``Config``."""
    if "_ns" in text:
        bound = re.compile(r"is an integer of at least (\d), less than 2\*\*62, not")
        text = bound.sub(
            lambda m: f"is a time of {'at least' if m[1] == '0' else 'more than'} 0 s, not", text
        )
        # Factors of two, and what has its unit already, are none of the numbers.
        text = re.sub(r"(?<!\* )-?\b\d+\b(?! s)", lambda m: f"{int(m[0]) / SECOND:g} s", text)
    return re.sub(r"\b(\w+)_(?:ns|bytes)\b", r"\1", text)


def _updated(base: Config, values: Mapping[str, Any], where: Callable[[str], str]) -> Config:
    """``base`` with other values; errors say where they came from.

    One after the other, so that the field in question is known; those that belong together last.
    """
    known = Config.__struct_fields__
    for name, value in values.items():
        if name not in known:
            if not isinstance(name, str):
                raise ValueError(f"{where(repr(name))}: there is no such field")
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {where(near[0]).rpartition(' ')[2]}?" if near else ""
            raise ValueError(f"{where(name)}: there is no such field{hint}")
        try:
            if name in READ:
                READ[name](name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where(name)}: {error}") from error
    try:
        made = msgspec.structs.replace(base, **values)
        # Not a field: it is neither compared nor written, and only errors know it.
        made.__dict__["places"] = {
            **base.__dict__.get("places", {}),
            **{name: where(name) for name in values},
        }
        return made
    except (TypeError, ValueError) as error:
        text = str(error)
        named = [name for name in values if re.search(rf"\b{name}\b", text)]
        shown = [name for name, value in values.items() if isinstance(value, str) and repr(value) in text]
        meant = named or shown
        raise ValueError(f"{', '.join(map(where, meant or values))}: {error}") from error
