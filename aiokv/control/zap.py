"""Who may connect to the channel over ZeroMQ: libzmq asks here, on the loop, for each peer that shows a key.

libzmq asks a socket of the same context at a fixed name (ZAP, RFC 27). pyzmq's own answers need a thread.
"""

from __future__ import annotations

import logging
from typing import Any

import zmq
from aiozmq import ZmqProtocol

from aiokv.control.base import MAX_FRAME
from aiokv.control.told import Told

__all__ = ["ENDPOINT", "Gate", "secure_client", "secure_server"]

_log = logging.getLogger("aiokv")

#: Where libzmq asks.
ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
#: Milliseconds until who connects must have shown a key that is let in.
_HANDSHAKE = 2000
#: Bytes that CURVE adds to a message, which libzmq counts in.
_SEALED = 33


class Gate(ZmqProtocol):  # type: ignore[misc]
    """Answers for the ROUTER that it stands behind, which names each request's asker first.

    Args:
        allow: Public keys of those who may come in, in hexadecimal.
    """

    def __init__(self, allow: frozenset[str]) -> None:
        self._allow = allow
        self._told = Told()
        self._transport: Any = None  # aiozmq's; None before it is connected

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 (aiozmq has no types)
        """The transport of the socket at ``ENDPOINT``."""
        self._transport = transport

    def msg_received(self, data: list[bytes]) -> None:
        """Let in who has a listed key, under its name; nobody else, and nobody by another mechanism."""
        asker, empty, version, request, _domain, address, _identity, mechanism, *credentials = data
        key = credentials[0].hex() if mechanism == b"CURVE" and len(credentials) == 1 else ""
        if version == _VERSION and key in self._allow:
            answer = [b"200", b"", key.encode()]
        else:
            # Once for each key: it comes back, twice a second.
            _log.log(
                self._told.level(key, "not allowed"),
                "connection from %s refused: key %s is not allowed",
                address.decode(),
                key,
            )
            # Not "400", which would end its socket for good, so that it isn't let in even once it is listed.
            answer = [b"300", b"not allowed", b""]
        self._transport.write([asker, empty, _VERSION, request, *answer, b""])


def secure_server(sock: zmq.Socket[bytes], secret: str) -> None:
    """Let only those connect to ``sock`` whom the gate lets in; nobody if there is no gate."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(secret))
    sock.setsockopt(zmq.ZAP_DOMAIN, b"aiokv")
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + _SEALED)


def secure_client(sock: zmq.Socket[bytes], public: str, secret: str, server: str) -> None:
    """Let ``sock`` talk only to who has the secret of the public key ``server``."""
    sock.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(public))
    sock.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(secret))
    sock.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
