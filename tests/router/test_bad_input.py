"""What clients and instances should not say, and what they get; the router serves on after each."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from aiokv.router.instance import Instance
from aiokv.router.messages import Abort, Heard, Load, Report, encode
from aiokv.testing.routed import Routed, routed

# What is refused here is refused by parsers, which don't know of loops.
pytestmark = pytest.mark.one_loop


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Routed]:
    """A router that is still fit at the end of the test."""
    async with routed(settings={"body": 1 << 16, "receive": 0.3}, context=100) as made:
        yield made
        status, answer = await made.post()
        assert (status, answer["choices"][0]["text"]) == (200, "t0 t1 t2 t3 ")


async def raw(site: Routed, *pieces: bytes, end: bool = False) -> bytes:
    """What comes back for these bytes, until the router closes."""
    host, port = site.router.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    if end:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b'{"model": "scripted", "prompt": "\xff"}', "prompt"),
        (b"[" * 20_000, None),
        (b'{"a": ' * 5_000, None),
        (b'{"prompt": "x"}', "model"),
        (b'{"model": 7, "prompt": "x"}', "model"),
        (b'{"model": "scripted"}', "prompt"),
        (b'{"model": "scripted", "prompt": 7}', "prompt"),
        (b'{"model": "scripted", "prompt": []}', "prompt"),
        (b'{"model": "scripted", "prompt": [true]}', "prompt"),
        (b'{"model": "scripted", "prompt": ["a", 1]}', "prompt"),
        (b'{"model": "scripted", "prompt": {"a": 1}}', "prompt"),
        (b'{"model": "scripted", "prompt": "x", "stream": "yes"}', "stream"),
        (b'{"model": "scripted", "prompt": "x", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "scripted", "prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"model": "scripted", "prompt": "x", "max_tokens": 1e999}', "max_tokens"),
    ],
)
async def test_bodies_that_cannot_be_meant(site: Routed, body: bytes, param: str | None) -> None:
    async with site.client.post(site.router.http + "/v1/completions", data=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param
    assert not site.decodes[0].seen


@pytest.mark.asyncio
@pytest.mark.parametrize("messages", [7, "x", [], [7], [{}], [{"role": 7}], {"role": "user"}])
async def test_messages_that_cannot_be_meant(site: Routed, messages: object) -> None:
    status, answer = await site.post("/v1/chat/completions", messages=messages)
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.asyncio
async def test_an_unknown_model(site: Routed) -> None:
    status, answer = await site.post(model="gpt-17")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.asyncio
async def test_a_prompt_over_the_context(site: Routed) -> None:
    assert (await site.post(prompt=list(range(100))))[0] == 200
    status, answer = await site.post(prompt=[list(range(101))])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
async def test_a_deadline_that_cannot_be_meant(site: Routed, value: str) -> None:
    assert (await site.post(headers={"X-Request-Timeout": value}))[0] == 400


@pytest.mark.asyncio
async def test_a_body_that_is_too_large_is_refused_before_it_is_read(site: Routed) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 99999999\r\n\r\n"
    )
    answer = await raw(site, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in answer


@pytest.mark.asyncio
async def test_a_body_that_is_compressed_is_not_written_out(site: Routed) -> None:
    body = gzip.compress(b'{"model": "scripted", "prompt": "' + b"x" * 10_000_000 + b'"}')
    assert len(body) < 1 << 16
    url = site.router.http + "/v1/completions"
    async with site.client.post(url, data=body, headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_encoding"


@pytest.mark.asyncio
async def test_a_body_that_never_ends(site: Routed) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 4096

    async with site.client.post(site.router.http + "/v1/completions", data=endless()) as response:
        assert response.status == 413


@pytest.mark.asyncio
async def test_a_body_that_does_not_come(site: Routed) -> None:
    host, port = site.router.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


@pytest.mark.asyncio
async def test_bodies_that_do_not_come_are_bounded_in_number() -> None:
    async with routed(settings={"concurrency": 1, "queue": 1, "receive": 5}) as site:
        host, port = site.router.http.removeprefix("http://").split(":")
        lines = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for _, writer in lines:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        while site.router._forwarder.admission._arriving < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        status, answer = await site.post()
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        for _, writer in lines:
            writer.close()
        while site.router._forwarder.admission._arriving:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await site.post())[0] == 200


@pytest.mark.asyncio
async def test_what_comes_whole_when_the_router_closes_is_refused(pair: Routed) -> None:
    host, port = pair.router.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 36\r\n\r\n")
    while not pair.router._forwarder.admission._arriving:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await pair.router.drain(1)
    writer.write(SMUGGLED)
    assert (await reader.readline()).startswith(b"HTTP/1.1 503")
    writer.close()
    assert not pair.prefills[0].seen


SMUGGLED = b'{"model": "scripted", "prompt": "x"}'


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X-A: b\rSmuggled: c\r\nContent-Length: 5\r\n",
        b"X-A: b\x00\r\nContent-Length: 5\r\n",
        b" folded: yes\r\nContent-Length: 5\r\n",
        b"X-Long: " + b"x" * 20_000 + b"\r\n",
    ],
)
async def test_headers_that_smuggle(site: Routed, head: bytes) -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n"
    answer = await raw(site, request, b"0\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert answer.count(b"HTTP/1.") == 1  # what was smuggled along was not taken for a request
    assert not site.prefills[0].seen and not site.decodes[0].seen


@pytest.mark.asyncio
async def test_nonsense_in_place_of_http(site: Routed, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        await raw(site, draw.randbytes(draw.randrange(1, 500)), end=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/", "/v1/models"])
async def test_methods_and_paths_there_are_not(site: Routed, path: str) -> None:
    async with site.client.delete(site.router.http + path) as response:
        assert response.status == 405
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    assert (await site.get("/v1/other"))[0] == 404
    assert (await site.get("/../../etc/passwd"))[0] == 404


# -- instances


def garbage(site: Routed, *frames: bytes) -> None:
    sender = site.network.channel(f"memory://stranger{os.urandom(4).hex()}")
    sender._loop = asyncio.get_running_loop()  # a port of its own is all that is needed
    port = sender.open("memory://router")
    for frame in frames:
        port.send(frame)


def report(**more: Any) -> Report:
    fields: dict[str, Any] = {
        "incarnation": os.urandom(16),
        "number": 1,
        "role": "prefill",
        "address": "memory://liar",
        "http": "http://127.0.0.1:1",
        "engines": ("tcp://127.0.0.1:1",),
        "models": ("scripted",),
        "fingerprint": "one",
        "context": 0,
        "interval": 1.0,
        "draining": False,
        "token": "t",
        "probe": "",
        "load": Load(),
        **more,
    }
    return Report(**fields)


@pytest.mark.asyncio
async def test_instances_that_report_garbage(site: Routed, seed: int) -> None:
    draw = random.Random(seed)
    whole = encode(report())
    frames = [draw.randbytes(draw.randrange(200)) for _ in range(50)]
    frames += [whole[: draw.randrange(len(whole))] for _ in range(50)]
    frames += [
        encode(Heard(b"x" * 16, b"y" * 16, 1, "up")),
        encode(Abort(b"x" * 16, "id", 0)),
        b"\x91" * 9999,
    ]
    frames += [
        encode(report(load=Load(running=-1))),
        encode(report(interval=1e-9)),
        encode(report(role="king")),
    ]
    frames += [encode(report(address="nowhere")), encode(report(http="file:///etc/passwd"))]
    garbage(site, *frames)
    await asyncio.sleep(0.05)
    assert site.router.registry.models() == ["scripted"]
    assert len(site.router.registry.groups("scripted")[0].prefills) == 1
    assert site.router._discovery.garbage > 100


@pytest.mark.asyncio
async def test_an_instance_that_lies_about_its_address_gets_nothing(site: Routed) -> None:
    honest = site.prefills[0]
    async with Instance(
        "memory://router",
        role="prefill",
        http=honest.http,
        models=["scripted"],
        fingerprint="one",
        engine="tcp://127.0.0.1:1",
        channel=site.network.channel("memory://liar"),
    ) as liar:
        with pytest.raises(ConnectionRefusedError, match="somebody else is at"):
            await liar.wait_up()
    (group,) = site.router.registry.groups("scripted")
    assert honest.http in [each.http for each in group.prefills]


@pytest.mark.asyncio
async def test_a_probe_takes_no_address_from_one_that_showed_itself(site: Routed) -> None:
    honest = site.prefills[0]
    async with Instance(
        "memory://router",
        role="prefill",
        http=honest.http,
        probe="/aiokv/instance",
        models=["scripted"],
        fingerprint="one",
        engine="tcp://127.0.0.1:1",
        channel=site.network.channel("memory://liar"),
    ) as liar:
        with pytest.raises(ConnectionRefusedError, match="another one has shown"):
            await liar.wait_up()
    assert honest.instance.incarnation in site.router.registry.members


@pytest.mark.asyncio
async def test_an_address_where_somebody_else_serves(site: Routed) -> None:
    async def anything(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 100_000)

    application = web.Application()
    application.router.add_get("/{any:.*}", anything)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = f"http://127.0.0.1:{runner.addresses[0][1]}"
    garbage(site, encode(report(http=http)))
    members = site.router.registry.members
    while not any("no instance" in each.why for each in members.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert len(site.router.registry.groups("scripted")[0].prefills) == 1
    # A server of somebody else's can be probed instead, where its instance says so.
    garbage(site, encode(report(http=http, probe="/health", models=("probed",))))
    while "probed" not in site.router.registry.models():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await runner.cleanup()


@pytest.mark.asyncio
async def test_a_flood_of_strangers_is_bounded() -> None:
    async with routed(settings={"instances": 8}) as site:
        garbage(site, *(encode(report(address=f"memory://{number}")) for number in range(500)))
        await asyncio.sleep(0.05)
        assert len(site.router.registry.members) == 8
        assert len(site.router._discovery._refusals) <= 64
        assert (await site.post())[0] == 200
