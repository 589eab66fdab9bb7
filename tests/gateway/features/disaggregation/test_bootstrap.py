"""Prefill and decode as SGLang does them: two legs at once, with a room in which they meet."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.fleet.breaker import OPEN
from tests.gateway.conftest import eventually, running
from tests.gateway.features.disaggregation.legs import CHAT, TEXT, replica, split, ways
from tests.support.fakes import Behaviour, FakeReplica, answers, dies, hangs, http, status, streams, writes


def sglang(*script: Behaviour) -> FakeReplica:
    return replica(*script, owner="sglang")


async def test_both_legs_are_the_same_and_meet_in_one_room() -> None:
    prefiller, decoder = sglang(answers("x")), sglang(answers("said", prompt=1504, cached=640))
    async with split([prefiller], [decoder]) as run:
        code, _, answer = await run.post({**CHAT, "bootstrap_room": 7, "bootstrap_host": "evil"})
        assert (code, answer["choices"][0]["message"]["content"]) == (200, "said")
        assert await ways(run) == {"remote": 1}
        await eventually(lambda: prefiller.requests)  # its answer is not waited for
        await run.post({**CHAT, "n": 2, "temperature": 1})
        counts = await run.metrics()
    first, second = prefiller.requests[0].json, decoder.requests[0].json
    assert first == second
    room = first.pop("bootstrap_room")
    assert first == {**CHAT, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
    assert 0 <= room < 1 << 63
    assert room != decoder.requests[1].json["bootstrap_room"]
    assert prefiller.requests[0].headers["x-request-id"] == decoder.requests[0].headers["x-request-id"]
    assert counts['warmroute_prompt_tokens_total{cache="hit",model="m",replica="d0"}'] == 1280, (
        "the decoder reports the hits of both"
    )


def says(**flags: Any) -> dict[str, Behaviour]:
    return {"/server_info": writes(http(200, json.dumps(flags).encode()))}


async def test_decoders_meet_a_listed_prefiller_at_the_port_that_its_engine_names() -> None:
    prefiller, decoder = sglang(answers("x")), sglang(answers("said"))
    prefiller.pages = says(disaggregation_mode="prefill", disaggregation_bootstrap_port=9001)
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(CHAT))[0] == 200
    assert decoder.requests[0].json["bootstrap_port"] == 9001


async def test_what_the_engines_say_of_their_roles_counts_where_no_source_does() -> None:
    prefiller, decoder = sglang(answers("x")), sglang(answers("said"))
    prefiller.pages = says(disaggregation_mode="prefill", disaggregation_bootstrap_port=9001)
    decoder.pages = says(disaggregation_mode="decode", disaggregation_bootstrap_port=9002)
    async with prefiller, decoder, running(prefiller.url, decoder.url) as run:
        code, _, answer = await run.post(CHAT)
        assert (code, answer["choices"][0]["message"]["content"]) == (200, "said")
        fleet, until = run.gateway.fleet, asyncio.Event()

        async def later(_request: Any, writer: Any) -> None:
            await until.wait()
            writer.write(http(200, b'{"disaggregation_mode":"null"}'))

        prefiller.pages = {"/server_info": later}
        await prefiller.stop()
        await fleet.probe_all(run.gateway.upstream)
        assert not fleet.target("m").prefillers
        async with prefiller:
            probing = asyncio.ensure_future(fleet.probe_all(run.gateway.upstream))
            await eventually(lambda: fleet.target("m").prefillers)
            assert fleet.target("m").replicas.keys() == {decoder.name}, "it has restarted, and has not been asked again"
            until.set()
            await probing
            assert fleet.target("m").replicas.keys() == {decoder.name, prefiller.name}
    assert prefiller.requests[0].json["bootstrap_port"] == 9001
    assert prefiller.requests[0].json == decoder.requests[0].json


async def test_prefillers_alone_are_no_pool_and_the_error_says_so() -> None:
    prefiller = sglang(answers("x"))
    prefiller.pages = {"/server_info": writes(http(200, b'{"disaggregation_mode":"prefill"}'))}
    async with prefiller, running(prefiller.url) as run:
        code, _, answer = await run.post(CHAT)
    assert (code, "it only computes prompts" in answer["error"]["message"]) == (503, True), answer


async def test_both_legs_have_the_priority() -> None:
    settings = {"/server_info": writes(http(200, b'{"enable_priority_scheduling":true}'))}
    prefiller, decoder = sglang(answers("x")), sglang(answers("said"))
    prefiller.pages = decoder.pages = settings
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(CHAT, headers={"X-Priority": "5"}))[0] == 200
    assert [each.requests[0].json["priority"] for each in (prefiller, decoder)] == [5, 5]


async def test_a_batch_has_a_room_for_each_prompt() -> None:
    prefiller, decoder = sglang(answers("x")), sglang(answers())
    async with split([prefiller], [decoder]) as run:
        await run.post({"model": "m", "prompt": ["one", "two", "three"]}, path="/v1/completions")
    body = decoder.requests[0].json
    assert len(set(body["bootstrap_room"])) == 3
    assert body["bootstrap_port"] == [8998] * 3


async def test_a_refusal_of_the_prefiller_is_the_clients() -> None:
    """The decoder would wait for ever."""
    never = asyncio.Event()
    prefiller, decoder = sglang(status(400, "no such thing")), sglang(hangs(never))
    async with split([prefiller], [decoder]) as run:
        code, _, answer = await run.post(CHAT)
        assert (code, answer["error"]["message"]) == (400, "no such thing")
        await eventually(lambda: decoder.gone)


async def test_a_refusal_of_the_decoder_ends_the_prefill() -> None:
    """The prefiller would wait for ever, too."""
    prefiller, decoder = sglang(hangs(asyncio.Event())), sglang(status(400, "no such thing"))
    async with split([prefiller], [decoder]) as run:
        code, _, answer = await run.post(CHAT)
        assert (code, answer["error"]["message"]) == (400, "no such thing")
        await eventually(lambda: prefiller.gone)


@pytest.mark.parametrize("failure", [status(500), status(429), dies])
async def test_another_prefiller_takes_the_place_of_one_that_fails(failure: Behaviour) -> None:
    """The decoder's call is ended, and both legs are sent again with another room."""

    async def waits(request: Any, writer: Any) -> None:
        if request.json["bootstrap_port"] == 1:
            await asyncio.Event().wait()
        await answers("said")(request, writer)

    bad, good, decoder = sglang(failure), sglang(answers("x")), sglang(waits)
    async with bad, good, decoder:
        pool = {
            "name": "p",
            "prefill": [{"url": bad.url, "name": "bad", "bootstrap_port": 1}, {"url": good.url, "name": "good"}],
            "decode": [{"url": decoder.url, "name": "d0"}],
        }
        async with running(pools=[pool]) as run:
            for seed in range(3):
                body = {**CHAT, "messages": [{"role": "user", "content": f"{seed} {TEXT}"}]}
                code, _, answer = await run.post(body)
                assert (code, answer["choices"][0]["message"]["content"]) == (200, "said")
    assert bad.requests
    rooms = [each.json["bootstrap_room"] for each in decoder.requests]
    assert len(set(rooms)) == len(rooms)


async def test_a_decoder_that_hears_first_of_its_prefillers_end_is_not_to_blame() -> None:
    end = asyncio.Event()
    prefiller, decoder = sglang(hangs(end)), sglang(status(500))
    async with split([prefiller], [decoder]) as run:
        asking = asyncio.create_task(run.post(CHAT))
        await eventually(lambda: run.gateway.upstream.silence_s(decoder.url) < float("inf"))  # its answer is there
        end.set()
        code, _, answer = await asking
        assert (code, "its prefiller p0 has failed" in answer["error"]["message"]) == (502, True), answer
        assert await ways(run) == {"prefill_failed": 1}


async def test_without_a_prefiller_a_replica_that_does_both_answers() -> None:
    prefiller, decoder, unified = sglang(status(500)), sglang(hangs(asyncio.Event())), sglang(answers("both"))
    async with split([prefiller], [decoder], unified) as run:
        for seed in range(4):
            code, _, answer = await run.post({**CHAT, "seed": seed})
            assert (code, answer["choices"][0]["message"]["content"]) == (200, "both")
    assert all("bootstrap_room" not in each.json for each in unified.requests)


async def test_a_prefiller_that_fails_during_a_stream_ends_it() -> None:
    """The decoder has begun its stream, and would wait for the prompt."""
    begun, never = asyncio.Event(), asyncio.Event()

    async def late(request: Any, writer: Any) -> None:
        await begun.wait()
        await status(500)(request, writer)

    async def opens(request: Any, writer: Any) -> None:
        begun.set()
        await streams("", hold=never)(request, writer)

    prefiller, decoder = sglang(late), sglang(opens)
    async with split([prefiller], [decoder]) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            text = await answer.text()
        assert "failed" in text or answer.status >= 500
        await eventually(lambda: decoder.gone)


@pytest.mark.parametrize("late", [False, True])
async def test_a_prefiller_that_fails_with_prompts_which_another_computes_is_to_blame(late: bool) -> None:
    """Before the decoder's first byte, or after it."""

    async def fails(request: Any, writer: Any) -> None:
        if late:
            await eventually(lambda: forms._ends._running)
        await status(500)(request, writer)

    async def waits(request: Any, writer: Any) -> None:
        ready = request.json["bootstrap_port"] != 1
        if late or ready:
            await streams("said" if ready else "", hold=None if ready else asyncio.Event())(request, writer)
        else:
            await asyncio.Event().wait()

    bad, good, decoders = sglang(fails), sglang(answers("x")), [sglang(waits) for _ in range(3)]
    bad.pages = says(disaggregation_bootstrap_port=1)
    async with split([bad, good], decoders) as run:
        forms: Any = run.gateway.lifecycle.extensions.decoding[0].__self__  # type: ignore[attr-defined]
        for seed in range(40):
            if len(bad.requests) == 5:
                break
            body = {**CHAT, "stream": True, "messages": [{"role": "user", "content": f"{seed} {TEXT}"}]}
            async with run.session.post(run.url + "/v1/chat/completions", json=body) as answer:
                assert "said" in await answer.text()
        state = run.gateway.fleet.named("p0")
        assert state is not None
        assert state.breaker.state(run.gateway.clock()) == OPEN


async def test_a_prefiller_is_not_interrupted_when_the_decoder_is_ready_first() -> None:
    go = asyncio.Event()

    async def late(request: Any, writer: Any) -> None:
        await go.wait()
        await answers("x")(request, writer)

    prefiller, decoder = sglang(late), sglang(answers("said"))
    async with split([prefiller], [decoder]) as run:
        assert (await run.post(CHAT))[0] == 200
        assert prefiller.gone == 0
        go.set()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    assert len(prefiller.requests) == 1


async def test_a_client_that_leaves_ends_both_legs() -> None:
    never = asyncio.Event()
    prefiller, decoder = sglang(hangs(never)), sglang(hangs(never))
    async with split([prefiller], [decoder]) as run:
        sending = asyncio.ensure_future(run.post(CHAT))
        await eventually(lambda: prefiller.requests and decoder.requests)
        sending.cancel()
        await eventually(lambda: prefiller.gone and decoder.gone)
