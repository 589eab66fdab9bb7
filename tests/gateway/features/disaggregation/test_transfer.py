"""Prefill and decode as vLLM does them: two legs, one after the other, and the prefiller's parameters between them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.fleet.breaker import CLOSED, OPEN
from tests.gateway.conftest import eventually, running
from tests.gateway.features.disaggregation.legs import CHAT, PARAMS, TEXT, prefills, replica, split, ways
from tests.support.fakes import STREAM_HEAD, FakeRequest, answers, chunk, dies, dies_now, hangs, http, status, streams, writes

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
Lines = Callable[[], list[dict[str, Any]]]


async def test_the_legs_are_those_of_vllms_proxy_field_by_field(request_lines: Lines) -> None:
    prefiller, decoder = replica(prefills()), replica(answers("said", prompt=1504, completion=4, cached=1503))
    body = {**CHAT, "max_completion_tokens": 40, "min_tokens": 3, "temperature": 0.5, "seed": 1}
    async with split([prefiller], [decoder]) as run:
        status_, headers, answer = await run.post(body, headers={"Authorization": "Bearer k", "X-Request-Id": "one"})
        assert (status_, answer["choices"][0]["message"]["content"]) == (200, "said")
        (first,), (second,) = prefiller.requests, decoder.requests
        assert first.json == {**body, "min_tokens": 0, "max_completion_tokens": 1, "kv_transfer_params": ASKED}
        assert second.json == {**body, "kv_transfer_params": PARAMS}
        assert first.path == second.path == "/v1/chat/completions"
        for name in ("x-request-id", "authorization"):
            assert first.headers[name] == second.headers[name]
        assert headers["X-Warmroute-Replica"] == "d0"
        assert await ways(run) == {"remote": 1}
        counts = await run.metrics()
    assert counts['warmroute_prompt_tokens_total{cache="hit",model="m",replica="d0"}'] == 640, "by the prefiller's word"
    assert counts['warmroute_prompt_tokens_total{cache="miss",model="m",replica="d0"}'] == 1504 - 640
    assert counts['warmroute_completion_tokens_total{model="m",replica="d0"}'] == 4, "its token was thrown away"
    (line,) = [each for each in request_lines() if each["id"] == "one"]
    assert (line["replica"], line["prefiller"], line["cached_tokens_reported"]) == ("d0", "p0", 640)


async def test_a_prefiller_gets_the_priority_and_its_rank_as_any_replica() -> None:
    refusal = http(400, b'{"error":{"message":"Got priority -5 but Priority scheduling is not enabled."}}')
    prefiller, decoder = replica(prefills(), writes(refusal), prefills()), replica(answers(prompt=1504))
    async with prefiller, decoder:
        pool = {
            "name": "p",
            "prefill": [{"url": prefiller.url, "name": "p0", "ranks": 2}],
            "decode": [{"url": decoder.url, "name": "d0"}],
        }
        async with running(pools=[pool]) as run:
            for text in (TEXT, f"other {TEXT}"):
                body = {**CHAT, "messages": [{"role": "user", "content": text}]}
                assert (await run.post(body, headers={"X-Priority": "5"}))[0] == 200
            assert (await ways(run))["remote"] == 2
    assert [request.json.get("priority") for request in prefiller.requests] == [-5, -5, None]
    assert prefiller.requests[0].headers["x-vllm-priority"] == "-5"
    assert all(request.headers["x-data-parallel-rank"] in ("0", "1") for request in prefiller.requests)
    assert [request.json.get("priority") for request in decoder.requests] == [-5, -5]


async def test_parameters_are_copied_as_they_were_written() -> None:
    text = '{"do_remote_prefill":true, "remote_block_ids": [[1,2 ]],"remote_engine_id":"\\u00e9","remote_request_id":"r",'
    text += '"remote_host":"h","remote_port":5600,"new_field":{"b":1e3,"a":[null]}}'
    prefiller, decoder = replica(prefills(written=text)), replica(answers())
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(CHAT))[0] == 200
    assert text.encode() in decoder.requests[0].body


@pytest.mark.parametrize(
    ("path", "body", "cap"),
    [
        ("/v1/chat/completions", CHAT, "max_tokens"),
        ("/v1/completions", {"model": "m", "prompt": TEXT, "max_tokens": 50}, "max_tokens"),
        ("/v1/messages", {**CHAT, "max_tokens": 50}, "max_tokens"),
        ("/v1/responses", {"model": "m", "input": TEXT, "store": False}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_path_has_its_limit_and_no_prefill_is_streamed(path: str, body: Any, cap: str, stream: bool) -> None:
    prefiller, decoder = replica(prefills()), replica(streams("a", "b") if stream else answers())
    body = {**body, "stream": stream} if stream else body
    async with split([prefiller], [decoder]) as run, run.session.post(run.url + path, json=body) as answer:
        assert answer.status == 200
        await answer.read()
    leg, rest = prefiller.requests[0].json, decoder.requests[0].json
    assert leg[cap] == 1
    assert not leg.get("stream")
    assert leg.get("stream_options") is None
    assert leg["kv_transfer_params"] == ASKED
    assert rest["kv_transfer_params"] == PARAMS
    assert rest.get(cap) == body.get(cap)
    assert bool(rest.get("stream")) == stream


async def test_a_translated_request_has_both_legs() -> None:
    prefiller, decoder = replica(prefills()), replica(answers("said", prompt=1504, completion=4, cached=1503))
    async with split([prefiller], [decoder]) as run:
        for state in run.gateway.fleet.replicas:
            run.gateway.fleet.lacks(state, "messages", time.monotonic())
        code, _, answer = await run.post({**CHAT, "max_tokens": 9}, path="/v1/messages")
    assert (code, answer["content"][0]["text"]) == (200, "said")
    assert prefiller.requests[0].path == decoder.requests[0].path == "/v1/chat/completions"
    assert decoder.requests[0].json["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    ("body", "way"),
    [
        ({**CHAT, "messages": [{"role": "user", "content": "short"}]}, "short"),
        ({**CHAT, "n": 2, "temperature": 1}, "several"),
    ],
)
async def test_what_needs_no_prefiller_goes_to_the_decoder_alone(body: Any, way: str, request_lines: Lines) -> None:
    prefiller, decoder = replica(prefills()), replica(answers())
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(body))[0] == 200
        assert await ways(run) == {way: 1}
    assert not prefiller.requests
    assert decoder.requests[0].json == body
    assert [line.get("prefiller") for line in request_lines() if line.get("replica") == "d0"] == [None]


async def test_a_prompt_that_the_decoder_holds_skips_the_prefiller() -> None:
    prefiller, decoder = replica(prefills()), replica(answers(prompt=1504, cached=0))
    more = [*CHAT["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and now?"}]
    async with split([prefiller], [decoder]) as run:
        await run.post(CHAT)
        await run.post({**CHAT, "messages": more})
        assert await ways(run) == {"remote": 1, "short": 1}


PARTIAL = {name: value for name, value in PARAMS.items() if name != "remote_request_id"}


@pytest.mark.parametrize(
    ("prefill", "way"),
    [
        (status(500), "prefill_refused"),
        (status(503), "prefill_refused"),
        (status(400), "prefill_refused"),
        (dies, "prefill_failed"),
        (prefills(None), "no_params"),
        (prefills([1]), "no_params"),
        (prefills(PARTIAL), "no_params"),
        (prefills({**PARAMS, "remote_block_ids": []}), "no_params"),
        (http(200, b"what?"), "prefill_failed"),
    ],
)
async def test_a_decoder_computes_what_a_prefiller_did_not(prefill: Any, way: str, caplog: pytest.LogCaptureFixture) -> None:
    async def writes(_request: Any, writer: Any) -> None:
        writer.write(prefill)

    prefiller, decoder = replica(writes if isinstance(prefill, bytes) else prefill), replica(answers("said"))
    async with split([prefiller], [decoder]) as run:
        code, _, answer = await run.post(CHAT)
        assert (code, answer["choices"][0]["message"]["content"]) == (200, "said")
        assert await ways(run) == {way: 1}
    assert [each.json for each in decoder.requests] == [CHAT], "nothing about a transfer"
    assert "a prefill failed" in caplog.messages


async def test_without_a_live_prefiller_decoders_compute() -> None:
    prefiller, decoder = replica(prefills()), replica(answers())
    async with split([prefiller], [decoder]) as run:
        await prefiller.stop()
        assert (await run.post(CHAT))[0] == 200
        assert (await run.post({**CHAT, "seed": 2}))[0] == 200
        assert not (await ways(run)).get("remote")
    assert [each.json.get("kv_transfer_params") for each in decoder.requests] == [None, None]


async def test_a_prefiller_that_fails_again_and_again_is_spared() -> None:
    prefiller, decoder = replica(status(500)), replica(answers("said"))
    async with split([prefiller], [decoder]) as run:
        for seed in range(30):
            assert (await run.post({**CHAT, "messages": [{"role": "user", "content": f"{seed} {TEXT}"}]}))[0] == 200
        counts = await ways(run)
    assert counts["prefill_refused"] == len(prefiller.requests) < counts["no_prefiller"]


async def test_another_prefiller_takes_the_place_of_a_dead_one() -> None:
    dead, good, decoder = replica(dies), replica(prefills()), replica(answers(prompt=1504))
    async with split([dead, good], [decoder]) as run:
        for seed in range(4):  # whichever is chosen first
            message = {"role": "user", "content": f"{seed} {TEXT}"}
            assert (await run.post({**CHAT, "messages": [message]}))[0] == 200
        assert await ways(run) == {"remote": 4}
    assert dead.requests


@pytest.mark.parametrize("answered", [True, False])
async def test_a_prefiller_is_blamed_if_the_decoder_computes_the_prompt_that_it_refused(answered: bool) -> None:
    prefiller, decoder = replica(status(500)), replica(answers() if answered else status(500))
    async with split([prefiller], [decoder]) as run:
        for seed in range(5):
            message = {"role": "user", "content": f"{seed} {TEXT}"}
            assert (await run.post({**CHAT, "messages": [message]}))[0] == (200 if answered else 500)
        state = run.gateway.fleet.named("p0")
        assert state is not None
        assert state.breaker.state(run.gateway.clock()) == (OPEN if answered else CLOSED)


async def test_the_prefiller_learns_its_rate_and_the_decoder_that_of_the_transfer() -> None:
    computed: list[float] = []

    async def computes(request: Any, writer: Any) -> None:
        computed.append(run.gateway.clock())
        await prefills(cached=0)(request, writer)

    async def takes_over(request: Any, writer: Any) -> None:
        since.append(run.gateway.router.ledger.loads["d0"].waiting[0].since)
        await answers(prompt=1504)(request, writer)

    since: list[float] = []
    prefiller, decoder = replica(computes), replica(takes_over)
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(CHAT))[0] == 200
        assert since > computed, "its time begins with its own leg"
        assert run.gateway.router.ledger.of("p0").rate.tokens > 0


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_a_decoder_that_goes_down_while_its_prefiller_dies_is_no_error_of_the_gateway(owner: str) -> None:
    async def dies_with_the_decoder(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await decoder.stop()
        await run.gateway.fleet.probe_all(run.gateway.upstream)
        dies_now(writer)

    prefiller, decoder = replica(dies_with_the_decoder, owner=owner), replica(hangs(asyncio.Event()), owner=owner)
    async with split([prefiller], [decoder]) as run:
        code, _, answer = await run.post(CHAT)
        assert (code, answer["error"]["code"]) == (502, "replica_failed"), answer


async def test_a_prompt_kills_two_prefillers_at_most() -> None:
    dead, decoder = [replica(dies) for _ in range(3)], replica(answers())
    async with split(dead, [decoder]) as run:
        assert (await run.post(CHAT))[0] == 200
        assert await ways(run) == {"prefill_failed": 1}
    assert sum(bool(each.requests) for each in dead) == 2


async def broken_stream(_request: Any, writer: Any) -> None:
    error = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
    writer.write(
        STREAM_HEAD + chunk(b"data: " + json.dumps(error).encode() + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_transfer_that_fails_is_computed_by_the_decoder(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The prefiller dies between its answer and the transfer: 500, or an error as the first event of the stream."""
    prefiller = replica(prefills())
    decoder = (
        replica(broken_stream, streams("a", "b", prompt=1504))
        if stream
        else replica(status(500), answers(prompt=1504, cached=0))
    )
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}} if stream else CHAT
    async with split([prefiller], [decoder]) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            assert (answer.status, "error" in text) == (200, False)
        assert await ways(run) == {"transfer_failed": 1}
        counts = await run.metrics()
    assert "a prefill failed" in caplog.messages
    assert [each.json.get("kv_transfer_params") for each in decoder.requests] == [PARAMS, None]
    assert counts['warmroute_prompt_tokens_total{cache="miss",model="m",replica="d0"}'] == 1504


async def test_a_dead_decoder_is_replaced_by_another_with_both_legs_again() -> None:
    prefiller, dead, good = replica(prefills()), replica(dies), replica(answers(prompt=1504))
    async with split([prefiller], [dead, good]) as run:
        for seed in range(4):  # whichever is chosen first
            message = {"role": "user", "content": f"{seed} {TEXT}"}
            assert (await run.post({**CHAT, "messages": [message]}))[0] == 200
    assert dead.requests
    assert [each.json["kv_transfer_params"] for each in (*dead.requests, *good.requests)] == [PARAMS] * len(
        [*dead.requests, *good.requests]
    )
    assert len(good.requests) == 4
    assert len(prefiller.requests) > 4


@pytest.mark.parametrize("name", ["kv_transfer_params", "\\u006bv_transfer_params", "bootstrap_room", "ec_transfer_params"])
@pytest.mark.parametrize("long", [False, True])
async def test_clients_do_not_steer_transfers(name: str, long: bool) -> None:
    prefiller, decoder = replica(prefills()), replica(answers())
    text = TEXT if long else "short"
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], "NAME": {"remote_prefill_cached_tokens": 9999}}
    )
    body = body.replace("NAME", name)
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(body.encode()))[0] == 200
    for request in (*prefiller.requests, *decoder.requests):
        assert b"9999" not in request.body
        assert request.json["messages"]


async def test_a_client_that_leaves_ends_the_prefill() -> None:
    never = asyncio.Event()
    prefiller, decoder = replica(hangs(never)), replica(answers())
    async with split([prefiller], [decoder]) as run:
        sending = asyncio.ensure_future(run.post(CHAT))
        await eventually(lambda: prefiller.requests)
        sending.cancel()
        await eventually(lambda: prefiller.gone)
        assert not decoder.requests


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
async def test_without_memory_for_the_bodies_of_legs_none_stays_open(owner: str) -> None:
    freed = asyncio.Event()

    async def holds(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await freed.wait()
        await answers()(request, writer)

    async with replica(prefills(), owner=owner) as prefiller, replica(holds, owner=owner) as decoder:
        pool = {"prefill": [prefiller.url], "decode": [decoder.url], "max_inflight": 1}
        async with running(pools=[pool]) as run:
            first = asyncio.ensure_future(run.post(CHAT))
            await eventually(lambda: decoder.requests)
            second = asyncio.ensure_future(run.post({**CHAT, "messages": [{"role": "user", "content": "long " * 60_000}]}))
            await eventually(lambda: run.gateway.fleet.target("m").admission.waiting)
            run.gateway.served.memory.limit = 400_000
            freed.set()
            assert (await first)[0] == 200
            assert (await second)[0] in (413, 503)


async def test_replicas_that_do_both_get_no_transfers() -> None:
    prefiller, decoder, unified = replica(prefills()), replica(dies), replica(answers("both"))
    async with split([prefiller], [decoder], unified) as run:
        for seed in range(4):
            code, _, answer = await run.post({**CHAT, "seed": seed})
            assert (code, answer["choices"][0]["message"]["content"]) == (200, "both")
    assert all("kv_transfer_params" not in each.json for each in unified.requests)


async def test_prefillers_answer_no_client() -> None:
    prefiller, decoder = replica(prefills()), replica(answers())
    async with split([prefiller], [decoder]) as run:
        await decoder.stop()
        code, _, answer = await run.post(CHAT)
        assert code in (502, 503), answer
        code, _, answer = await run.post(CHAT)
        assert (code, "p0 (it only computes prompts)" in answer["error"]["message"]) == (503, True)
    assert len(prefiller.requests) <= 1
