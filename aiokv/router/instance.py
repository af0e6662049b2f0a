"""``Instance``: what a server needs to take part: it reports itself, answers aborts, and drains.

async with Instance(
    "tcp://127.0.0.1:7000", role="decode", http="http://127.0.0.1:8001", models=["smollm2"],
    fingerprint="...", engine=engine.address, load=lambda: Load(running=3),
) as instance:
    ...                                   # the server answers GET /aiokv/instance with instance.identity()
    with instance.request(transfer_id, attempt):
        ...                               # cancelled when the router says that nobody wants it any more
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import msgspec

from aiokv.control.access import checked_access
from aiokv.control.base import Channel, Port
from aiokv.control.choice import channel_at, checked_binding
from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.errors import AiokvError, BusyError, ClosedError, RemoteProtocolError, TransferAborted
from aiokv.router.messages import (
    ROLES,
    Abort,
    Aborted,
    Bye,
    FromInstance,
    Heard,
    Load,
    Report,
    Role,
    decode_from_router,
    encode,
)
from aiokv.router.registry import checked_url

__all__ = ["IDENTITY_PATH", "Instance"]

_log = logging.getLogger("aiokv")

#: Where a server shows who it is.
IDENTITY_PATH = "/aiokv/instance"
#: Aborts that came before their request did.
_TOMBSTONES = 1024


class Instance:
    """One server in the router's books; an async context manager.

    Entering binds the control channel and begins to report; the server has to be listening. Leaving says
    goodbye. All of it belongs to the loop that it was entered on. Where the router can't be reached, it goes
    on reporting: a router that is started later, or again, knows it after one interval.

    Args:
        router: Control address of the router, with its key where there are keys.
        role: ``prefill`` or ``decode``.
        http: ``http://host:port``, where the router reaches the server.
        models: Names of the model that requests may use.
        fingerprint: What the KV of both instances of a request must have in common, layout and model.
        engine: Address of the transfer engine, or of one for each rank; needed for ``prefill``.
        context: Tokens of prompt and answer, at most; 0: not known.
        load: What there is to do; called for each report, so it must be quick.
        token: What the router shows the server with each request (``Authorization: Bearer``), for servers
            that have API keys of their own; by default one that is made up here.
        probe: A path that answers 200, for a server of somebody else's that has no ``identity`` to show. Then
            nobody but this instance vouches for its being at ``http``.
        interval: Seconds between reports (0.05 to 60). After three without one the instance is gone.
        bind: Address of the control channel, as for ``TransferEngine``.
        advertise: What the router is told instead of it.
        keys: Its own keys; then all control traffic is encrypted, and ``router`` names the router's key.
        allow: The router's public key.
        tls: Certificates, for ``tls://``.
        insecure: Let ``bind`` be reached from other hosts by whoever is there.
        channel: A channel made by the caller, in place of ``bind`` and what belongs to it.

    Attributes:
        incarnation: Who this is; a new one for each ``Instance``.
        token: What the router shows with each request; see ``authorized``.
        draining: Nothing new is to be taken.
        state: What the router says: ``unknown``, ``joining``, ``up`` or ``refused``.
        why: Why it is refused.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: One that can't be meant.
    """

    def __init__(
        self,
        router: str,
        *,
        role: Role,
        http: str,
        models: Sequence[str],
        fingerprint: str,
        engine: str | Sequence[str] = (),
        context: int = 0,
        load: Callable[[], Load] = Load,
        token: str = "",
        probe: str = "",
        interval: float = 1.0,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        keys: Keys | None = None,
        allow: Sequence[str] | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        channel: Channel | None = None,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role is prefill or decode, not {role!r}")
        if role == "prefill" and not engine:
            raise ValueError("engine= is needed for prefill: KV is fetched from there")
        if isinstance(models, str) or not models:
            raise ValueError(f"models is a list of at least one name, not {models!r}")
        checked_url(http)
        if probe and not probe.startswith("/"):
            raise ValueError(f"probe={probe!r} is no path")
        if channel is None:
            checked_binding(bind, advertise)
            access = checked_access(bind, keys, allow, tls, insecure=insecure, advertise=advertise)
            channel = channel_at(bind, advertise, access)
        self._channel = channel
        self._router = router
        self._load = load
        self.incarnation = os.urandom(16)
        self.token = token or secrets.token_urlsafe(24)
        self._report = Report(
            incarnation=self.incarnation,
            number=0,
            role=role,
            address="",
            http=http,
            engines=tuple(filter(None, [engine] if isinstance(engine, str) else engine)),
            models=tuple(models),
            fingerprint=fingerprint,
            context=context,
            interval=float(interval),
            draining=False,
            token=self.token,
            probe=probe,
            load=Load(),
        )
        try:  # what no router could read fails here
            msgspec.msgpack.decode(encode(self._report), type=Report)
        except msgspec.ValidationError as error:
            raise ValueError(f"the router could not read this: {error}") from error
        self._port: Port | None = None  # None before it is entered and after it is left
        self._timer: asyncio.TimerHandle | None = None  # as the port
        self._requests: dict[tuple[str, int], asyncio.Task[object]] = {}
        #: Aborted before they came.
        self._unwanted: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()
        self.draining = False
        self.state = "unknown"
        self.why = ""

    def __repr__(self) -> str:
        what = "draining" if self.draining else self.state
        return f"<Instance {self._report.role} {self._report.http} {what}, {len(self._requests)} requests>"

    async def __aenter__(self) -> Self:
        """Bind, and report for the first time.

        Raises:
            OSError: The address can't be bound.
            ValueError: ``router`` is no address that this channel can reach.
        """
        address = await self._channel.start(self._on_frame)
        try:
            self._report = msgspec.structs.replace(self._report, address=address)
            self._port = self._channel.open(self._router)
        except BaseException:
            await self._channel.aclose()
            raise
        self._beat()
        return self

    async def __aexit__(self, *_: object) -> None:
        port, self._port = self._port, None
        if self._timer is not None:
            self._timer.cancel()
        self.draining = True
        try:
            if port is not None:
                self._say(Bye(self.incarnation), port)
                # A frame that was handed over is on its way; a moment, or closing would take it back.
                await asyncio.sleep(0.02)
        finally:
            await self._channel.aclose()

    # -- what the server asks

    def identity(self) -> dict[str, str]:
        """The server's answer, as JSON, to ``GET /aiokv/instance``: that it is the one that reports."""
        return {"incarnation": self.incarnation.hex(), "role": self._report.role}

    def authorized(self, header: str | None) -> bool:
        """Whether a request comes from the router, by its ``Authorization`` header."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self.token}".encode())

    @property
    def requests(self) -> int:
        """Requests that are being answered."""
        return len(self._requests)

    @contextmanager
    def request(self, transfer: str, attempt: int) -> Iterator[None]:
        """While it lasts, the task that entered it is cancelled when the router gives the request up.

        The abort is answered once the context was left.

        Raises:
            TransferAborted: The router gave it up before it came.
            BusyError: It is being answered already.
            ClosedError: The instance is draining.
        """
        task, name = asyncio.current_task(), (transfer, attempt)
        if task is None:
            raise RuntimeError("a request is answered by a task")
        if name in self._unwanted:
            raise TransferAborted(f"request {transfer}, attempt {attempt}: {self._unwanted[name]}")
        if name in self._requests:
            raise BusyError(f"request {transfer}, attempt {attempt} is being answered already")
        if self.draining:
            raise ClosedError("this instance is draining")
        self._requests[name] = task
        self._idle.clear()
        try:
            yield
        finally:
            del self._requests[name]
            if not self._requests:
                self._idle.set()
            if name in self._unwanted:
                self._say(Aborted(self.incarnation, *name))

    def drain(self) -> None:
        """Take nothing new from now on, and tell the router so; what is being answered goes on.

        May be called from a signal handler of the loop, and more than once.
        """
        if not self.draining:
            self.draining = True
            self._beat()

    async def wait_idle(self) -> None:
        """Until no request is being answered."""
        await self._idle.wait()

    async def wait_up(self) -> None:
        """Until the router gives this instance requests.

        Raises:
            ConnectionRefusedError: It said that it won't, and why.
        """
        while self.state != "up":
            if self.state == "refused":
                raise ConnectionRefusedError(f"{self._router}: {self.why}")
            self._changed.clear()
            await self._changed.wait()

    # -- what goes on

    def _beat(self) -> None:
        """Report, and again after the interval."""
        if self._port is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._report.interval, self._beat)
        try:
            load = self._load()
        except Exception:  # noqa: BLE001 - the caller's: an instance whose load isn't known is alive all the same
            _log.exception("router: the load of this instance can't be told")
            load = self._report.load
        self._report = msgspec.structs.replace(
            self._report, number=self._report.number + 1, draining=self.draining, load=load
        )
        self._say(self._report)

    def _say(self, message: FromInstance, port: Port | None = None) -> None:
        port = port or self._port
        if port is None:
            return
        try:
            port.send(encode(message))
        except AiokvError as error:  # the router isn't there; the next report may find it
            _log.debug("router at %s: %s", self._router, error)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = decode_from_router(frame)
        except RemoteProtocolError as error:
            _log.debug("router at %s: %s", self._router, error)
            return
        if message.incarnation != self.incarnation:
            return  # meant for who had this address before
        match message:
            case Heard():
                if (message.state, message.why) != (self.state, self.why):
                    log = _log.warning if message.state == "refused" else _log.info
                    log("router at %s: %s %s", self._router, message.state, message.why)
                self.state, self.why = message.state, message.why
                self._changed.set()
            case Abort():
                self._on_abort((message.transfer, message.attempt), message.why)

    def _on_abort(self, name: tuple[str, int], why: str) -> None:
        again = name in self._unwanted
        self._unwanted[name] = why
        while len(self._unwanted) > _TOMBSTONES:
            self._unwanted.popitem(last=False)
        task = self._requests.get(name)
        if task is None:
            self._say(Aborted(self.incarnation, *name))
        elif not again:
            task.cancel()
