"""TLS for the stream channel: ``Tls`` is what a user gives, a ``TlsEnd`` is one connection's.

It is the standard library's, fed by hand (``ssl.MemoryBIO``): so a connection is bounded and dropped during
its handshake in the same way as after it, on every event loop.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Tls", "TlsEnd"]

#: How a certificate, and a private key of any kind, begin in PEM form.
_BEGINS = rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----", rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates for control addresses of the form ``tls://host:port``.

    Both contexts are used as they are. They must present the same certificate: its fingerprint names this
    engine in its address, and peers drop what comes with another.

    Attributes:
        server: For connections that peers open. It must ask for a certificate (``CERT_REQUIRED``), else
            anybody can connect, which an engine refuses unless ``insecure`` is asked for.
        client: For connections to peers.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(
        cls,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        *,
        ca: str | os.PathLike[str],
        check_hostname: bool = True,
    ) -> Self:
        """Contexts from PEM files, with TLS 1.3 and a certificate asked for both ways.

        Reads files, so it is not for a running loop.

        Args:
            certificate: This engine's, followed by those between it and the authority, if any.
            key: Its private key, not encrypted, which only its owner can read.
            ca: Certificates of the authorities that vouch for peers.
            check_hostname: Whether a peer's certificate must also name the host that was connected to. An
                address names the certificate itself, so that those without host names are safe, too.

        Raises:
            OSError: A file can't be read.
            PermissionError: Others than its owner can read or write the key, too.
            ValueError: A file isn't what it should be: no PEM, encrypted, the key of another certificate.
        """
        _check_files(certificate, key, ca)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = check_hostname
        server.num_tickets = 0  # nobody resumes; a ticket that isn't read turns a close into a reset
        for context in (server, client):
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            _load_authorities(context, "ca", ca)
            _load_pair(context, certificate, key)
        return cls(server, client)

    @property
    def mutual(self) -> bool:
        """Whether peers have to show a certificate."""
        return self.server.verify_mode is ssl.CERT_REQUIRED

    def fingerprint(self) -> str:
        """SHA-256 of this engine's own certificate, in hexadecimal: what peers list in ``allow=``.

        ``openssl x509 -in engine.pem -noout -fingerprint -sha256`` tells the same.

        A context doesn't tell what certificate it holds, so one is asked for in a handshake in memory. That
        takes a few milliseconds.

        Raises:
            ssl.SSLError: The server's context has no certificate.
        """
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        asking, asked = TlsEnd(anybody, ""), TlsEnd(self.server)
        asking.receive(b"")
        while not asking.ready:
            asked.receive(asking.outgoing())
            asking.receive(asked.outgoing())
        return asking.peer

    def server_end(self) -> TlsEnd:
        """The end of a connection that a peer opened."""
        return TlsEnd(self.server)

    def client_end(self, host: str) -> TlsEnd:
        """The end of a connection to a host; begin by sending ``outgoing()``."""
        end = TlsEnd(self.client, host)
        end.receive(b"")
        return end


def _check_files(*files: str | os.PathLike[str]) -> None:
    """See whether there are a certificate, a key and authorities; ``ssl`` names no file in its errors."""
    for role, begins, file in zip(("certificate", "key", "ca"), (*_BEGINS, _BEGINS[0]), files, strict=True):
        try:
            with Path(file).open("rb") as opened:
                mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
                text = opened.read()
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(code, f"{role}: {os.strerror(code)}", os.fspath(file)) from error
        if not re.search(begins, text):
            what = "private key" if role == "key" else "certificate"
            raise ValueError(f"{role}: {os.fspath(file)} holds no {what} in PEM form")
        if role == "key" and mode & 0o077:
            raise PermissionError(f"key: {file} is open to others (mode {mode:04o}): chmod 600 {file}")


def _load_authorities(context: ssl.SSLContext, role: str, file: str | os.PathLike[str]) -> None:
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"{role}: {os.fspath(file)} can't be used: {error.reason or error}") from error


def _load_pair(
    context: ssl.SSLContext, certificate: str | os.PathLike[str], key: str | os.PathLike[str]
) -> None:
    def password() -> str:  # or OpenSSL would ask at the terminal
        raise ValueError(f"key: {os.fspath(key)} is encrypted; a key without pass phrase is needed")

    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise ValueError(
                f"key: {os.fspath(key)} belongs to another certificate than {os.fspath(certificate)}"
            ) from error
        # Which of the two it was isn't said; certificates can be read on their own.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "certificate", certificate)
        raise ValueError(
            f"key: {os.fspath(key)} with certificate {os.fspath(certificate)} can't be used: "
            f"{error.reason or error}"
        ) from error


class TlsEnd:
    """One end of one connection: bytes in, bytes out, nothing in between.

    Args:
        context: The settings.
        host: Where this end connects to; None where the peer connected.
    """

    def __init__(self, context: ssl.SSLContext, host: str | None = None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=host is None, server_hostname=host or None
        )
        #: The handshake is done.
        self.ready = False

    @property
    def peer(self) -> str:
        """SHA-256 of the peer's certificate, in hexadecimal; empty if it showed none."""
        certificate = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(certificate).hexdigest() if certificate else ""

    def receive(self, data: bytes | memoryview) -> bytes:
        """What the peer said in the bytes that arrived; the handshake goes on first.

        Raises:
            ssl.SSLError: The peer doesn't keep to the protocol, or isn't trusted; ``outgoing`` tells it so.
        """
        self._in.write(data)
        said = []
        try:
            if not self.ready:
                self._tls.do_handshake()
                self.ready = True
            # Each read gives one record, of 16 KiB at most. One that finds nothing raises, which costs more.
            while (self._in.pending or self._tls.pending()) and (piece := self._tls.read(1 << 16)):
                said.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the peer's last word; its end of the connection closes, too
        return said[0] if len(said) == 1 else b"".join(said)

    def seal(self, data: bytes) -> bytes:
        """What to send for the peer to receive ``data``.

        Raises:
            ssl.SSLError: Nothing can be sent.
        """
        self._tls.write(data)
        return self._out.read()

    def outgoing(self) -> bytes:
        """What the protocol itself has to send."""
        return self._out.read() if self._out.pending else b""
