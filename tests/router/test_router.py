"""The router against servers without a model: what goes well."""

from __future__ import annotations

import json

import aiohttp
import pytest

from aiokv.testing.routed import Routed, routed


@pytest.mark.asyncio
async def test_an_answer_comes_from_the_decode(pair: Routed) -> None:
    status, answer = await pair.post(seed=7)
    assert status == 200
    assert answer["choices"][0]["text"] == "t0 t1 t2 t3 "
    assert answer["usage"]["total_tokens"] == 5


@pytest.mark.asyncio
async def test_a_stream_comes_event_by_event(pair: Routed) -> None:
    status, events = await pair.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True
    )
    assert status == 200
    assert events[-1] == "data: [DONE]"
    words = [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(words) == "t0 t1 t2 t3 "


@pytest.mark.asyncio
async def test_both_sides_get_the_body_as_it_came_but_for_what_is_set(pair: Routed) -> None:
    body = (
        b'{"model": "scripted", "prompt": "\\u00e9", "temperature": 0.10, "max_tokens": 40, "stream": true,'
        b'"stream_options": {"include_usage": true}, "own": {"a": [1e2, null]}, "kv_transfer_params": "x"}'
    )
    async with pair.client.post(pair.router.http + "/v1/completions", data=body) as response:
        await response.read()
    (prefill,), (decode,) = pair.prefills[0].seen, pair.decodes[0].seen
    for side in (prefill, decode):
        assert b'"temperature":0.10' in side.raw  # not even a number is written anew
        assert side.body["own"] == {"a": [100.0, None]}
    assert decode.body["max_tokens"] == 40 and decode.body["stream_options"] == {"include_usage": True}
    assert prefill.body["max_tokens"] == 1 and prefill.body["stream"] is False
    assert "stream_options" not in prefill.body
    one, other = prefill.body["kv_transfer_params"], decode.body["kv_transfer_params"]
    assert one["transfer_id"] == other["transfer_id"] and one["attempt"] == other["attempt"] == 0
    prefilling = pair.router.registry.groups("scripted")[0].prefills[0]
    assert other["remote_addresses"] == list(prefilling.report.engines)
    assert one["do_remote_decode"] and other["do_remote_prefill"]
    assert 0 < other["deadline"] <= 600


@pytest.mark.asyncio
async def test_of_a_clients_headers_only_the_trace_goes_on(pair: Routed) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await pair.post(
        headers={"traceparent": trace, "Authorization": "Bearer secret", "Cookie": "a=b", "X-A": "b"}
    )
    for server in pair.servers:
        (seen,) = server.seen
        assert seen.headers["traceparent"] == trace
        assert "secret" not in str(seen.headers)
        assert not {"Cookie", "X-A"} & set(seen.headers)
        assert seen.headers["Authorization"] == f"Bearer {server.instance.token}"


@pytest.mark.asyncio
async def test_an_instances_own_refusal_reaches_the_client(pair: Routed) -> None:
    for server in pair.servers:
        server.mode = "refuse"
    status, answer = await pair.post()
    assert status == 400
    assert answer["error"]["message"] == "told to refuse"


@pytest.mark.asyncio
async def test_models_and_health(pair: Routed) -> None:
    assert (await pair.get("/v1/models"))[1]["data"][0]["id"] == "scripted"
    assert (await pair.get("/v1/models/scripted"))[0] == 200
    assert (await pair.get("/v1/models/other"))[0] == 404
    assert (await pair.get("/healthz"))[0] == 200
    assert await pair.get("/readyz") == (200, {"status": "ready", "models": ["scripted"]})


@pytest.mark.asyncio
async def test_metrics_and_feed_tell_of_requests(pair: Routed) -> None:
    await pair.post(stream=True)
    await pair.post(model="other")
    async with pair.client.get(pair.router.http + "/metrics") as response:
        text = await response.text()
    assert 'aiokv_router_requests_total{status="200"} 1.0' in text
    assert 'aiokv_router_instances{role="prefill",state="up"} 1.0' in text
    _, feed = await pair.get("/feed.json")
    assert feed["ended"] == {"answered": 1, "model_not_found": 1}
    assert [each["role"] for each in feed["instances"]] == ["decode", "prefill"]
    assert feed["latencies"]["first_token"]["p50"] > 0


@pytest.mark.asyncio
async def test_load_is_spread(two: Routed) -> None:
    for server in two.servers:
        server.mode = "hang"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        import asyncio

        url = two.router.http + "/v1/completions"
        asked = [
            asyncio.ensure_future(client.post(url, json={"model": "scripted", "prompt": str(number)}))
            for number in range(8)
        ]
        while sum(len(server.seen) for server in two.servers) < 16:
            for server in two.servers:
                server.came.clear()
            waits = [asyncio.ensure_future(server.came.wait()) for server in two.servers]
            await asyncio.wait(waits, return_when="FIRST_COMPLETED")
            for each in waits:
                each.cancel()
        assert [len(server.seen) for server in two.servers] == [4, 4, 4, 4]
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.asyncio
async def test_an_api_key_is_asked_for_where_one_is_set() -> None:
    async with routed(router={"api_keys": ["good", "also"]}) as site:
        for header in ({}, {"Authorization": "Bearer bad"}, {"Authorization": "good"}):
            status, answer = await site.post(headers=header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for key in ("good", "also"):
            assert (await site.post(headers={"Authorization": f"Bearer {key}"}))[0] == 200
        assert (await site.get("/healthz"))[0] == 200
        assert (await site.get("/feed.json"))[0] == 404  # nor does the page show itself to whoever has no key


@pytest.mark.asyncio
async def test_the_page_can_be_elsewhere() -> None:
    async with routed(router={"page": "127.0.0.1:0"}) as site:
        assert (await site.get("/feed.json"))[0] == 404
        async with site.client.get(site.router.page + "/feed.json") as response:
            assert response.status == 200
        async with site.client.post(site.router.page + "/v1/completions") as response:
            assert response.status == 404


@pytest.mark.asyncio
async def test_draining_lets_what_is_under_way_end() -> None:
    import asyncio

    async with routed(pace=0.05) as site:
        asked = asyncio.ensure_future(site.post(stream=True))
        await site.decodes[0].came.wait()
        drained = asyncio.ensure_future(site.router.drain(10))
        await asyncio.sleep(0)
        status, answer = await site.post()
        assert (status, answer["error"]["code"]) == (503, "closing")
        assert (await site.get("/readyz"))[0] == 503
        await drained
        assert (await asked)[1][-1] == "data: [DONE]"
