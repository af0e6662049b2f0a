"""How a router reaches instances: one HTTP session for all, and the attempts that are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import aiohttp
import msgspec

from aiokv.router.instance import IDENTITY_PATH
from aiokv.router.registry import Member
from aiokv.router.settings import RouterSettings

if TYPE_CHECKING:
    from aiokv.router.attempt import Attempt
    from aiokv.router.discovery import Discovery

__all__ = ["Wire"]

#: Seconds that a prefill's answer may come after the last token.
_TAIL = 1.0
_IDENTITY = msgspec.json.Decoder(dict[str, str])


class Wire:
    """An async context manager.

    Args:
        settings: Bounds and times.

    Attributes:
        session: For all requests to instances; None of aiohttp's own time-outs but the one for connecting.
        discovery: Whom to tell of an instance that can't be reached, and of aborts; set by the router.
        attempts: Those under way.
    """

    session: aiohttp.ClientSession
    discovery: Discovery

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.attempts: set[Attempt] = set()
        self._tails: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            # No limit: requests were admitted before. Idle connections are kept less long than servers do:
            # uvicorn's 5 s are the least.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            headers={"Content-Type": "application/json"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tails:
            task.cancel()
        await asyncio.gather(*self._tails, return_exceptions=True)
        await self.session.close()

    def let_end(self, prefilling: asyncio.Task[None], late: Callable[[], None]) -> None:
        """The answer is out; let the prefill's own come, for a moment, and call ``late`` if it doesn't."""
        if prefilling.done():
            return
        self._tails.add(prefilling)
        timer = asyncio.get_running_loop().call_later(_TAIL, late)
        prefilling.add_done_callback(self._tails.discard)
        prefilling.add_done_callback(lambda _: timer.cancel())

    def gone(self, member: Member, why: str) -> None:
        """An instance is no more; what it was at is told so."""
        for attempt in tuple(self.attempts):
            attempt.lost(member, why)

    async def ask(self, member: Member) -> str:
        """Whether the instance is at the HTTP address that it names; gives why not, or nothing."""
        headers = {"Authorization": f"Bearer {member.report.token}"}
        try:
            async with (
                asyncio.timeout(self.settings.connect),
                self.session.get(
                    member.http + (member.report.probe or IDENTITY_PATH),
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                if member.report.probe:
                    what = f"{member.http}{member.report.probe} answers {response.status}"
                    return "" if response.status == 200 else what
                said = _IDENTITY.decode(await response.content.read(4096))
        except TimeoutError:
            return f"{member.http} doesn't answer within {self.settings.connect:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"{member.http} can't be reached: {error}"
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return f"{member.http} is no instance of aiokv's"
        if said.get("incarnation") != member.incarnation.hex():
            return f"somebody else is at {member.http}"
        return ""
