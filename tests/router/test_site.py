"""What is served beside the calls of clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiokv.router.faults import busy
from aiokv.testing.routed import routed

PAGE = Path(__file__).parents[2] / "aiokv" / "router" / "page"


def test_nothing_comes_from_elsewhere() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, file.name


@pytest.mark.asyncio
@pytest.mark.usefixtures("no_threads_left")
@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/icon.svg"])
async def test_the_page_is_served_with_a_policy(path: str) -> None:
    async with routed(0, 0) as site, site.client.get(site.router.page + path) as response:
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert await response.read()


def test_errors_have_openais_shape() -> None:
    fault = busy("too much")
    assert json.loads(fault.body) == {
        "error": {"message": "too much", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }
    assert fault.headers["Retry-After"] == "1"
