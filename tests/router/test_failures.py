"""Instances that fail, hang, stop in the middle or are gone, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable

import aiohttp
import msgspec
import pytest

from aiokv.testing.routed import Routed, routed
from aiokv.testing.servers import Mode, ScriptedServer


async def came(*servers: ScriptedServer) -> None:
    """Until each of them has a request."""
    for server in servers:
        await server.came.wait()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what nobody tells of."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def aborted(server: ScriptedServer) -> None:
    """Until its last request was given up."""
    await server.seen[-1].cancelled.wait()


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("mode", ["fail", "busy", "cut"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_that_fails_is_tried_elsewhere_once(two: Routed, mode: Mode, stream: bool) -> None:
    for each in two.decodes:
        each.mode = "hang"  # as one whose fetch waits for a KV that doesn't come
    bad = two.prefills[0]
    bad.mode = mode
    two.prefills[1].mode = mode
    asked = asyncio.ensure_future(two.post(stream=stream))
    # Whichever was chosen first has failed by the time the second one is asked.
    await came(*two.decodes)
    status, answer = await asked
    assert status == 502
    assert answer["error"]["type"] == "server_error"
    attempts = [seen.transfer[1] for each in two.prefills for seen in each.seen]
    assert sorted(attempts) == [0, 1]
    assert len({seen.transfer[0] for each in two.servers for seen in each.seen}) == 1
    for each in two.decodes:
        await aborted(each)


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("mode", ["fail", "busy", "cut", "hang"])
async def test_the_second_attempt_answers(mode: Mode) -> None:
    async with routed(2, 2, settings={"first_token": 0.4}) as two:
        two.prefills[0].mode = mode
        for each in two.decodes:
            each.mode = "hang"
        two.decodes[1].mode = "answer"
        # The pair of the first attempt is the one that was given less: number 0 of both.
        status, answer = await two.post()
        assert (status, answer["choices"][0]["text"]) == (200, "t0 t1 t2 t3 ")
        assert two.prefills[1].seen[0].transfer[1] == two.decodes[1].seen[0].transfer[1] == 1
        await aborted(two.decodes[0])
        await two.decodes[0].instance.wait_idle()


@pytest.mark.asyncio
async def test_an_answer_that_is_no_stream_may_take_longer_than_a_first_token() -> None:
    async with routed(settings={"first_token": 0.2}, pace=0.15) as site:
        assert (await site.post())[0] == 200
        assert len(site.decodes[0].seen) == 1


@pytest.mark.asyncio
async def test_a_prefill_that_is_over_is_not_needed_any_more() -> None:
    async with routed(1, 1, pace=0.2) as site:
        asked = asyncio.ensure_future(site.post())
        await came(*site.servers)
        await site.prefills[0].instance.wait_idle()
        await asyncio.sleep(0.05)
        member = site.router.registry.groups("scripted")[0].prefills[0]
        site.router._wire.gone(member, "it said goodbye")
        assert (await asked)[0] == 200


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("mode", ["fail", "busy", "error", "nonsense"])
async def test_a_decode_that_fails_before_its_first_token_is_tried_elsewhere(two: Routed, mode: Mode) -> None:
    two.decodes[0].mode = mode
    status, events = await two.post(stream=True)
    assert status == 200 and events[-1] == "data: [DONE]"
    assert two.decodes[1].seen[0].transfer[1] == 1


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.parametrize("mode", ["cut", "end"])
async def test_a_stream_that_breaks_off_ends_with_an_error(pair: Routed, mode: Mode) -> None:
    pair.decodes[0].mode = mode
    status, events = await pair.post(stream=True)
    assert status == 200
    last = json.loads(events[-1].removeprefix("data: "))  # and not half an event before it
    assert last["error"]["code"] == "instance_lost"
    assert len(events) == 3
    assert len(pair.prefills[0].seen) == 1  # tokens were sent, so it is not tried again


@pytest.mark.asyncio
async def test_a_stream_that_stops_ends_with_an_error() -> None:
    async with routed(settings={"between_tokens": 0.3}) as site:
        site.decodes[0].mode = "stop"
        _, events = await site.post(stream=True)
        assert json.loads(events[-1][6:])["error"]["code"] == "stalled"
        await aborted(site.decodes[0])


@pytest.mark.asyncio
async def test_a_stream_that_said_that_it_is_over_is_over(
    pair: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.router.attempt._END", 0.05)
    pair.decodes[0].mode = "linger"
    status, events = await pair.post(stream=True)
    assert (status, events[-1]) == (200, "data: [DONE]")
    await aborted(pair.decodes[0])  # its connection was closed
    assert pair.router.figures.ended == {"answered": 1}


@pytest.mark.asyncio
async def test_a_prefill_that_goes_on_after_the_answer_is_aborted(
    pair: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.router.wire._TAIL", 0.05)
    prefill = pair.prefills[0]
    prefill.mode = "hang"
    assert (await pair.post())[0] == 200
    await aborted(prefill)
    await until(lambda: prefill.seen[0].transfer in prefill.instance._unwanted)  # by a message, too


@pytest.mark.asyncio
async def test_a_prefill_that_is_over_is_no_load(pair: Routed) -> None:
    pair.decodes[0].mode = "stop"
    asked = asyncio.ensure_future(pair.post(stream=True))
    await came(*pair.servers)
    (group,) = pair.router.registry.groups("scripted")
    await until(lambda: not group.prefills[0].in_flight)
    assert group.decodes[0].in_flight == 1
    asked.cancel()
    await aborted(pair.decodes[0])
    await until(lambda: not group.decodes[0].in_flight)
    assert group.prefills[0].in_flight == 0


@pytest.mark.asyncio
@pytest.mark.one_loop
@pytest.mark.skipif(sys.platform != "linux", reason="that a full backlog answers nothing is Linux's way")
async def test_one_that_lets_nobody_connect_is_not_counted_as_a_try() -> None:
    async with routed(3, 3, interval=5, settings={"connect": 0.2}) as site:
        for each in site.decodes[:2]:
            each.mode = "hang"
        site.prefills[1].mode = "fail"
        prefill = site.router.registry.groups("scripted")[0].prefills[0]
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as only:
            only.connect(full.getsockname())
            at = f"http://127.0.0.1:{full.getsockname()[1]}"
            prefill.report = msgspec.structs.replace(prefill.report, http=at)
            assert (await site.post())[0] == 200
        assert prefill.suspect
        assert site.router.figures.failures == {"instance_lost": 1, "prefill_failed": 1}


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_deadlines_hold(pair: Routed, stream: bool) -> None:
    for each in pair.servers:
        each.mode = "hang"
    status, answer = await pair.post(stream=stream, headers={"X-Request-Timeout": "0.2"})
    assert (status, answer["error"]["code"]) == (504, "deadline")
    for each in pair.servers:
        assert each.seen[0].body["kv_transfer_params"]["deadline"] <= 0.2
        await aborted(each)


@pytest.mark.asyncio
async def test_an_instance_that_is_gone_in_the_moment_of_the_deadline(pair: Routed) -> None:
    for each in pair.servers:
        each.mode = "hang"
    asked = asyncio.ensure_future(pair.post(headers={"X-Request-Timeout": "0.3"}))
    await came(*pair.servers)
    (attempt,) = pair.router._wire.attempts
    attempt._scope._on_timeout()  # what the loop calls when the time is over
    pair.router._wire.gone(attempt.decode, "it was silent for three intervals")
    status, answer = await asked
    assert status == 504
    assert answer["error"]["code"] in ("deadline", "first_token")


@pytest.mark.asyncio
async def test_a_deadline_in_the_middle_of_a_stream(pair: Routed) -> None:
    pair.decodes[0].mode = "stop"
    status, events = await pair.post(stream=True, headers={"X-Request-Timeout": "0.3"})
    assert status == 200
    assert json.loads(events[-1][6:])["error"]["code"] == "deadline"


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_both_sides(pair: Routed, stream: bool) -> None:
    for each in pair.servers:
        each.mode = "hang"
    asked = asyncio.ensure_future(pair.post(stream=stream))
    await came(*pair.servers)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    for each in pair.servers:
        await aborted(each)
        await each.instance.wait_idle()
    assert (await pair.get("/feed.json"))[1]["ended"] == {"client_gone": 1}


@pytest.mark.asyncio
async def test_a_client_that_goes_away_in_the_middle_aborts_the_decode(pair: Routed) -> None:
    pair.decodes[0].mode = "stop"
    url = pair.router.http + "/v1/completions"
    async with aiohttp.ClientSession() as client:
        response = await client.post(url, json={"model": "scripted", "prompt": "x", "stream": True})
        await response.content.readany()
        response.close()
    await aborted(pair.decodes[0])


@pytest.mark.asyncio
async def test_an_instance_that_falls_silent_takes_its_requests_along() -> None:
    async with routed(1, 1, interval=0.1) as site:
        site.decodes[0].mode = "stop"
        asked = asyncio.ensure_future(site.post(stream=True))
        await came(*site.servers)
        site.decodes[0].instance._timer.cancel()  # type: ignore[union-attr]
        _, events = await asked
        assert json.loads(events[-1][6:])["error"]["code"] == "instance_lost"
        status, answer = await site.post()
        assert (status, answer["error"]["code"]) == (503, "no_instance")
        assert len(site.decodes[0].seen) == 1


@pytest.mark.asyncio
async def test_a_prefill_that_falls_silent_before_the_first_token_is_tried_elsewhere() -> None:
    async with routed(2, 2, interval=0.1) as site:
        site.prefills[0].mode = site.decodes[0].mode = "hang"
        asked = asyncio.ensure_future(site.post())
        await came(site.prefills[0])
        site.prefills[0].instance._timer.cancel()  # type: ignore[union-attr]
        status, _ = await asked
        assert status == 200
        assert site.prefills[1].seen[0].transfer[1] == 1


@pytest.mark.asyncio
async def test_one_that_cannot_be_reached_gets_nothing_until_it_reports() -> None:
    async with routed(2, 2, interval=5) as site:
        registry = site.router.registry
        dead = site.prefills[0]
        runner = dead._stack
        # Its HTTP server ends, and its reports don't come to an end yet, as with a SIGKILL.
        dead.instance._port = None
        await runner.aclose()
        for _ in range(6):
            assert (await site.post())[0] == 200
        suspects = [each for each in registry.members.values() if each.suspect]
        assert [each.http for each in suspects] == [dead.http]


@pytest.mark.asyncio
async def test_no_instance_is_503_at_once_with_a_reason(two: Routed) -> None:
    for each in two.decodes:
        each.instance.drain()
    await asyncio.sleep(0.05)
    status, answer = await two.post()
    assert status == 503
    assert "no decode instance" in answer["error"]["message"]
    for each in two.prefills:
        each.instance.drain()
    await asyncio.sleep(0.05)
    assert "draining" in (await two.post())[1]["error"]["message"]
    assert (await two.get("/readyz"))[0] == 503


@pytest.mark.asyncio
async def test_nobody_registered_at_all() -> None:
    async with routed(0, 0) as site:
        url = site.router.http + "/v1/completions"
        async with site.client.post(url, json={"model": "m", "prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1


@pytest.mark.asyncio
async def test_an_instance_that_drains_finishes_what_it_has() -> None:
    async with routed(1, 1, pace=0.05) as site:
        asked = asyncio.ensure_future(site.post(stream=True))
        await came(site.decodes[0])
        site.decodes[0].instance.drain()
        assert (await asked)[1][-1] == "data: [DONE]"
        await site.decodes[0].instance.wait_idle()


@pytest.mark.asyncio
async def test_beyond_the_queue_429_with_retry_after() -> None:
    async with routed(settings={"concurrency": 1, "queue": 1}) as site:
        for each in site.servers:
            each.mode = "hang"
        first = asyncio.ensure_future(site.post())
        await came(*site.servers)
        second = asyncio.ensure_future(site.post())
        await until(lambda: site.router._forwarder.admission.waiting == 1)
        url = site.router.http + "/v1/completions"
        async with site.client.post(url, json={"model": "scripted", "prompt": "x"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "queue_full"
        for each in site.servers:
            each.mode = "answer"
        first.cancel()
        assert (await second)[0] == 200  # has its place now
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.one_loop
async def test_a_slow_reader_is_cut_off_and_costs_no_memory() -> None:
    async with routed(settings={"between_tokens": 0.4}, tokens=100_000) as site:
        host, port = site.router.http.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps({"model": "scripted", "prompt": "x", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await came(site.decodes[0])
        await aborted(site.decodes[0])  # while nothing is read
        assert site.router.figures.failures == {"stalled": 1}
        writer.close()


@pytest.mark.asyncio
async def test_aborts_are_said_again_until_they_are_answered(pair: Routed) -> None:
    decode = pair.decodes[0]
    member = pair.router.registry.groups("scripted")[0].decodes[0]
    discovery = pair.router._discovery
    heard = decode.instance._on_abort
    seen: list[tuple[str, int]] = []

    def deaf(name: tuple[str, int], why: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            heard(name, why)

    decode.instance._on_abort = deaf  # type: ignore[method-assign]
    discovery.abort(member, "some", 1, "why")
    await until(lambda: not discovery._lines[member.incarnation].owed)
    assert seen == [("some", 1)] * 3
