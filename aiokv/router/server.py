"""``Router``: everything together, entered and left; needs ``pip install 'aiokv[router]'``."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Self

from aiohttp import web

from aiokv.control.access import checked_access
from aiokv.control.address import bracketed, host_and_port
from aiokv.control.base import Channel
from aiokv.control.choice import channel_at, checked_binding
from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.router.discovery import Discovery
from aiokv.router.feed import Feed
from aiokv.router.figures import Figures
from aiokv.router.forward import Forwarder
from aiokv.router.registry import Registry
from aiokv.router.selection import LeastLoaded, Selection
from aiokv.router.settings import RouterSettings
from aiokv.router.site import apart, clients, operators
from aiokv.router.wire import Wire

__all__ = ["Router"]


class Router:
    """An OpenAI-compatible router; an async context manager.

    Entering binds its addresses. Leaving closes them: what is under way is given up at the instances at
    once; ``drain`` lets it end before. All of it belongs to the loop that it was entered on.

    Args:
        http: ``host:port`` for clients; port 0 takes a free one.
        control: Address of the control channel, for instances, as ``TransferEngine``'s ``bind``.
        page: ``host:port`` for the page, its feed and the metrics, where they aren't to be at ``http``. With
            ``api_keys`` they are nowhere else, since whoever looks at them shows no key.
        advertise: What instances are told instead of ``control``.
        keys: The router's own keys, for instances over CURVE.
        allow: Public keys of the instances.
        tls: Certificates, for ``tls://``.
        api_keys: Clients show one of them (``Authorization: Bearer ...``); empty: nobody is asked.
        insecure: Let strangers on other hosts reach an address without keys.
        settings: Bounds and times.
        selection: Which instances a request goes to.
        channel: A control channel made by the caller, in place of ``control`` and what belongs to it.

    Attributes:
        http: Where clients reach it, as ``http://host:port``; empty before it is entered.
        control: Where instances reach it.
        page: Where the page is; empty where there is none.
        registry: The instances.
        figures: What it did.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: One that can't be meant, or an address that needs keys.
    """

    def __init__(
        self,
        *,
        http: str = "127.0.0.1:8000",
        control: str = "tcp://127.0.0.1:7000",
        page: str | None = None,
        advertise: str | None = None,
        keys: Keys | None = None,
        allow: Sequence[str] | None = None,
        tls: Tls | None = None,
        api_keys: Collection[str] = (),
        insecure: bool = False,
        settings: RouterSettings | None = None,
        selection: Selection | None = None,
        channel: Channel | None = None,
    ) -> None:
        self._at = _place(http, "http")
        self._page_at = None if page is None else _place(page, "page")
        if isinstance(api_keys, str) or not all(isinstance(key, str) and key for key in api_keys):
            raise TypeError("api_keys is a list of keys, none of them empty")
        for place, known in ((self._at, bool(api_keys)), (self._page_at, False)):
            if place is not None and not (known or insecure or _loopback(place[0])):
                raise ValueError(
                    f"{place[0]}:{place[1]} can be reached from other hosts, where anybody could use it: "
                    "pass API keys (the page has none; put it behind a proxy that asks), or insecure=True"
                )
        if channel is None:
            checked_binding(control, advertise)
            access = checked_access(control, keys, allow, tls, insecure=insecure, advertise=advertise)
            channel = channel_at(control, advertise, access)
        self._api_keys = tuple(api_keys)
        settings = settings or RouterSettings()
        self.registry = Registry(settings.instances)
        self.figures = Figures()
        self._wire = Wire(settings)
        self._discovery = Discovery(channel, self.registry, ask=self._wire.ask, gone=self._wire.gone)
        self._wire.discovery = self._discovery
        self._forwarder = Forwarder(self._wire, self.registry, selection or LeastLoaded(), self.figures)
        self._feed = Feed(
            self.registry, self._discovery, self._forwarder.admission, self.figures, time.monotonic_ns
        )
        self._stack = AsyncExitStack()
        self.http = self.control = self.page = ""

    async def __aenter__(self) -> Self:
        """Bind.

        Raises:
            OSError: An address can't be bound.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._wire)
            await stack.enter_async_context(self._discovery)
            self.control = self._discovery.address
            site = clients(self._forwarder, self.registry, self._api_keys, self._wire.settings.body)
            if self._page_at is None and not self._api_keys:
                site.add_routes(operators(self._forwarder, self.registry, self._feed))
            self.http = await _served(stack, site, self._at)
            if self._page_at is not None:
                beside = apart(self._forwarder, self.registry, self._feed)
                self.page = await _served(stack, beside, self._page_at)
            elif not self._api_keys:
                self.page = self.http
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._forwarder.closing = "this router is closing"
        await self._stack.aclose()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait for what is under way, for so long at most."""
        self._forwarder.closing = "this router is closing"
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._forwarder.admission.wait_idle()


async def _served(stack: AsyncExitStack, application: web.Application, at: tuple[str, int]) -> str:
    """Serve it there until the stack is closed; gives its URL."""
    runner = web.AppRunner(
        application,
        handler_cancellation=True,  # a client that goes away is a request that is given up
        access_log=None,
        shutdown_timeout=0.5,
        keepalive_timeout=75,
        lingering_time=1.0,
        auto_decompress=False,  # a few bytes may stand for gigabytes, and the loop would write them out
        # A URL and headers are read before anything is known of a client.
        max_line_size=8190,
        max_field_size=8190,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, *at, backlog=1024, reuse_address=True)
    await site.start()
    port = runner.addresses[0][1]
    return f"http://{bracketed(at[0])}:{port}"


def _place(text: str, name: str) -> tuple[str, int]:
    if not isinstance(text, str):
        raise TypeError(f"{name} is host:port, not {text!r}")
    try:
        return host_and_port(text)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
