"""The operators' page in a real browser: light, dark, by keyboard, and with axe's rules of accessibility.

Needs Playwright and a Chromium of the system; a screenshot of each scheme is kept in $AIOKV_ARTIFACTS if that
is set.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.async_api", reason="needs a browser: pip install playwright")

pytest.importorskip("axe_playwright_python", reason="needs its rules: pip install axe-playwright-python")

from axe_playwright_python.async_playwright import Axe
from playwright import async_api as playwright

from aiokv.testing.routed import Routed, routed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    # The browser's driver is a process that outlives nothing, but it is started in ways that would block.
    pytest.mark.may_block("the browser's driver"),
    pytest.mark.one_loop,
]


@asynccontextmanager
async def opened(site: Routed, scheme: str = "light", **options: Any) -> AsyncIterator[Any]:
    """The page in a browser, with its figures there; fails the test at an error in the console."""
    errors: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(color_scheme=scheme, **options)
        page = await context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda request: None if request.url.startswith(site.router.page) else errors.append(request.url),
        )
        await page.goto(site.router.page)
        await page.wait_for_selector("#now dd")
        yield page
        await browser.close()
    # What a test made fail on purpose is in the console, too.
    assert [each for each in errors if not each.startswith("Failed to load resource")] == []
    await asyncio.get_running_loop().shutdown_default_executor()


def artifact(name: str) -> str | None:
    folder = os.environ.get("AIOKV_ARTIFACTS")
    return str(Path(folder) / name) if folder else None


@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_shows_what_goes_on_and_axe_finds_nothing(scheme: str) -> None:
    async with routed(2, 2) as site:
        await site.post(stream=True)
        await site.post(model="other")
        site.decodes[1].instance.drain()
        site.decodes[0].mode = "hang"
        asked = asyncio.ensure_future(site.post())
        await site.decodes[0].came.wait()
        # Axe runs in the page as a script of its own, which the page's policy forbids.
        async with opened(site, scheme, bypass_csp=True) as page:
            await page.wait_for_selector("td:text-is('draining')")
            assert await page.locator("#rows tr").count() == 4
            assert "Ready: 2 prefill and 1 decode up" in await page.inner_text("#health")
            assert "model not found" in await page.inner_text("#failures")
            tiles = await page.inner_text("#now")
            assert "Requests in flight\n1" in tiles
            ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
            if file := artifact(f"router-{scheme}.png"):
                await page.screenshot(path=file, full_page=True)
            found = await Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.asyncio
async def test_it_is_used_by_keyboard() -> None:
    async with routed(1, 1) as site, opened(site) as page:
        focused = "document.activeElement.textContent"
        await page.keyboard.press("Tab")
        assert await page.evaluate(focused) == "Skip to the instances"
        await page.keyboard.press("Tab")
        assert await page.evaluate(focused) == "Pause"
        await page.keyboard.press("Space")
        assert await page.get_attribute("#pause", "aria-pressed") == "true"
        assert await page.inner_text("#health") == "Paused"
        await page.keyboard.press("Space")
        await page.wait_for_selector("#health:has-text('Ready')")
        for _ in range(2):  # the table's own region, then its first column
            await page.keyboard.press("Tab")
        assert await page.evaluate(focused) == "Role"
        await page.keyboard.press("Enter")
        assert await page.get_attribute("th:has-text('Role')", "aria-sort") == "descending"
        assert (await page.inner_text("#rows tr:first-child td")).startswith("prefill")


@pytest.mark.asyncio
async def test_names_of_instances_are_shown_and_not_run() -> None:
    evil = "<img src=x onerror=alert(1)>"
    async with routed(1, 1, models=["scripted", evil]) as site, opened(site) as page:
        await page.wait_for_selector("#rows tr")
        assert evil in await page.inner_text("#rows")
        assert await page.locator("#rows img").count() == 0


@pytest.mark.asyncio
async def test_nobody_is_here_and_the_router_ends() -> None:
    async with routed(0, 0) as site, opened(site) as page:
        assert "Not ready" in await page.inner_text("#health")
        assert await page.is_visible("#nobody")
        assert f"--router {site.router.control}" in await page.inner_text("#start")
        await page.route("**/feed.json", lambda route: route.fulfill(status=503))
        await page.wait_for_selector("#health:has-text('figures are old')")
        await page.unroute("**/feed.json")
        await page.wait_for_selector("#health:has-text('Not ready')")
