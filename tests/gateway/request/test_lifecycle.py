"""Requests through a real gateway on real sockets, in front of replicas that do their worst."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from multidict import CIMultiDict

from bench.measure.ports import free_port
from gateway.errors import GatewayError, ReplicaFailure
from gateway.upstream.dialer import failure_of
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_after_headers,
    dies_in_plain_body,
    event,
    hangs,
    http,
    status,
    streams,
    usage,
    writes,
)

STREAM = {**BODY, "stream": True}
TURNS = {"routing": {"policy": "round_robin"}}  # so that a broken replica is sure to be tried first sometimes


async def text_of(run: Running, **options: Any) -> str:
    stream = await run.client.chat.completions.create(**STREAM, **options)
    return "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])


async def test_a_plain_answer_comes_through_byte_for_byte() -> None:
    body = b'{"choices": [], "x": "\xc3\xa9",   "usage": null}'
    async with FakeReplica([writes(http(200, body, "application/json", "X-Vendor: 1"))]) as replica, running(replica) as run:
        answer = await run.session.post(run.url + "/v1/chat/completions", json=BODY)
        assert await answer.read() == body
        assert answer.headers["X-Vendor"] == "1"
        assert answer.headers["X-Warmroute-Replica"] == replica.name
        assert answer.headers["X-Warmroute-Cached-Tokens"] == "0"
        assert answer.headers["Content-Length"] == str(len(body))
        assert answer.headers["Server"] == "warmroute"


async def test_a_request_reaches_the_replica_as_it_was_sent() -> None:
    raw = b'{ "model":"m", "messages":[{"role":"user","content":"hi"}], "vendor_field": [1.50, null] }'
    async with FakeReplica() as replica, running(replica) as run:
        headers = {
            "Authorization": "Bearer s",
            "X-Request-Id": "id-1",
            "traceparent": "00-a-b-01",
            "Connection": "X-Hop",
            "X-Hop": "1",
        }
        _, answer, _ = await run.post(raw, headers=headers, path="/v1/chat/completions?x=%2F1")
        sent = replica.requests[0]
        assert (sent.body, sent.path) == (raw, "/v1/chat/completions?x=%2F1")
        assert sent.headers["authorization"] == "Bearer s"
        assert sent.headers["traceparent"] == "00-a-b-01"
        assert answer["X-Request-Id"] == "id-1"
        assert sent.headers["host"] == replica.name
        assert "x-hop" not in sent.headers


async def test_a_stream_comes_through_and_its_usage_is_taken_out_unless_asked_for() -> None:
    async with FakeReplica([streams("a", "b", "c", cached=64)]) as replica, running(replica) as run:
        assert await text_of(run) == "abc"
        assert replica.requests[0].json["stream_options"] == {"include_usage": True}
        async with run.session.post(run.url + "/v1/chat/completions", json=STREAM) as answer:
            assert b"usage" not in await answer.read()
        wanted = await run.client.chat.completions.create(**STREAM, stream_options={"include_usage": True})
        last = [part async for part in wanted][-1]
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == 64
        samples = await run.metrics()
        labels = f'model="m",replica="{replica.name}"'
        assert samples[f'warmroute_prompt_tokens_total{{cache="hit",{labels}}}'] == 3 * 64
        assert samples[f'warmroute_prompt_tokens_total{{cache="miss",{labels}}}'] == 3 * 36


async def test_a_plain_answer_to_a_stream_request_is_no_first_token() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        code, headers, body = await run.post(STREAM)
        assert (code, body["choices"][0]["message"]["content"]) == (200, "hello")
        assert "X-Accel-Buffering" not in headers
        assert not any(name.startswith("warmroute_ttft_seconds") for name in await run.metrics())


async def test_a_chunk_is_not_held_back() -> None:
    go_on = asyncio.Event()
    async with FakeReplica([streams("first", "second", hold=go_on)]) as replica, running(replica) as run:
        stream = await run.client.chat.completions.create(**STREAM)
        parts = aiter(stream)
        assert (await anext(parts)).choices[0].delta.content == "first"
        assert run.gateway.router.ledger.of(replica.name).decoding == 1
        go_on.set()
        assert (await anext(parts)).choices[0].delta.content == "second"
        assert [part async for part in parts] == []


GARBAGE = [
    writes(b"\x00\x01\x02 this is not HTTP\r\n\r\n"),
    writes(http(200, b"<html>welcome</html>", "text/html")),
    writes(http(200, b"[1, 2]")),
    writes(http(200, b'{"truncated": ')),
]


@pytest.mark.parametrize("bad", [dies, dies_in_plain_body, status(500), status(503), status(429), *GARBAGE])
async def test_a_failure_before_the_first_byte_is_not_seen_by_the_client(bad: Behaviour) -> None:
    async with FakeReplica([bad]) as broken, FakeReplica() as good, running(broken, good, **TURNS) as run:
        for _ in range(4):  # whichever is tried first
            code, headers, body = await run.post()
            assert (code, body["choices"][0]["message"]["content"]) == (200, "hello")
            assert headers["X-Warmroute-Replica"] == good.name
        assert broken.requests, "the broken replica was never tried: the test shows nothing"
        assert sum(value for name, value in (await run.metrics()).items() if name.startswith("warmroute_retries_total")) >= 1
        held = run.gateway.router.trie.held()
        assert held[broken.name] == 0, "a replica that failed is credited with nothing"
        assert held[good.name] > 0


EMPTY_STREAM = writes(STREAM_HEAD + b"0\r\n\r\n")
NOT_A_STREAM = writes(http(200, b"<html>", "text/html"))


@pytest.mark.parametrize("bad", [dies, dies_after_headers, streams(die=True), EMPTY_STREAM, NOT_A_STREAM])
async def test_a_stream_that_fails_before_its_first_byte_moves_on(bad: Behaviour) -> None:
    async with FakeReplica([bad]) as broken, FakeReplica([streams("x", "y")]) as good, running(broken, good, **TURNS) as run:
        for _ in range(4):
            assert await text_of(run) == "xy"
        assert broken.requests


async def test_a_refused_connection_takes_the_replica_out_at_once() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        assert (await run.post())[0] == 200
        warm, other = (one, two) if one.requests else (two, one)
        await warm.stop()
        code, headers, _ = await run.post()
        assert (code, headers["X-Warmroute-Replica"]) == (200, other.name)
        assert [state.up for state in run.gateway.fleet.replicas if state.name == warm.name] == [False]
        assert run.gateway.router.trie.held()[warm.name] == 0, "its cache went with it"


def without_idle_connections(**options: Any) -> FakeReplica:
    """Its end is noticed by the next request only: each answer to a probe ends its connection."""
    listing = writes(http(200, b'{"data": [{"id": "m"}]}', "application/json", "Connection: close"))
    return FakeReplica(listing=listing, pages={"/metrics": status(404, "no", "Connection: close")}, **options)


async def test_with_all_replicas_down_a_client_gets_a_502_and_then_a_503() -> None:
    async with without_idle_connections() as one, without_idle_connections() as two, running(one, two) as run:
        await one.stop()
        await two.stop()
        code, _, body = await run.post()
        assert code == 502
        assert one.name in body["error"]["message"]
        code, headers, body = await run.post()
        assert (code, headers["Retry-After"], body["error"]["code"]) == (503, "2", "no_replica_available")
        assert (await run.metrics())['warmroute_requests_total{code="503",endpoint="/v1/chat/completions",model="m"}'] == 1
        assert (await run.get("/ready"))[0] == 503
        assert (await run.get("/health"))[0] == 200


async def test_a_down_replica_comes_back_by_itself() -> None:
    port = free_port()
    async with FakeReplica(port=port) as replica, running(replica, health={"interval_s": 0.02}) as run:
        await replica.stop()
        await eventually(lambda: not run.gateway.fleet.pools[0].ready)
        async with FakeReplica(port=port):
            await eventually(lambda: run.gateway.fleet.pools[0].ready)
            assert (await run.post())[0] == 200


async def test_when_every_replica_refuses_the_client_gets_the_engines_own_message() -> None:
    async with FakeReplica([status(503, "queue full", "Retry-After: 7")]) as one, running(one) as run:
        code, headers, body = await run.post()
        assert (code, headers["Retry-After"], body["error"]["message"]) == (503, "7", "queue full")
        code, headers, body = await run.post()
        assert (code, body["error"]["message"]) == (503, "queue full"), "it asked for rest, but no other is there"
        assert len(one.requests) == 2


async def test_an_engines_4xx_is_the_clients_business_and_not_retried() -> None:
    async with (
        FakeReplica([status(400, "too long")]) as one,
        FakeReplica([status(400, "too long")]) as two,
        running(one, two) as run,
    ):
        code, _, body = await run.post()
        assert (code, body["error"]["message"]) == (400, "too long")
        assert len(one.requests) + len(two.requests) == 1


async def test_a_prompt_that_kills_its_engine_does_not_walk_through_the_fleet() -> None:
    fleet = [FakeReplica([dies]) for _ in range(6)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], fleet[4], fleet[5], running(*fleet) as run:
        code, _, body = await run.post()
        assert (code, body["error"]["code"]) == (502, "replica_failed")
        # The first replica gets it twice: the pooled connection might just have been closed for being idle.
        assert sorted(len(replica.requests) for replica in fleet) == [0, 0, 0, 0, 1, 2]


async def test_a_prompt_that_ends_its_engine_counts_as_its_own_fault_also_on_a_pooled_connection() -> None:
    """The engine dies of it, so that the repeat on a fresh connection is refused: still, it had been reached."""
    fleet = [FakeReplica() for _ in range(6)]

    def dies_for_good(replica: FakeReplica) -> Behaviour:
        async def behave(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
            replica.refuse()

        return behave

    for replica in fleet:
        replica.script = [dies_for_good(replica)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], fleet[4], fleet[5], running(*fleet) as run:
        assert (await run.post())[0] == 502
        assert sum(bool(replica.requests) for replica in fleet) == 3
        assert sum(state.up for state in run.gateway.fleet.replicas) == 3


async def test_a_stream_that_breaks_off_ends_with_an_error_event(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    async with FakeReplica([streams("a", die=True)]) as one, running(one) as run:
        parts = aiter(await run.client.chat.completions.create(**STREAM))
        assert (await anext(parts)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="failed while it answered"):
            await anext(parts)
        await eventually(request_lines)
        (line,) = request_lines()
        assert "failed while it answered" in line["error"]
        assert (line["level"], line["status"]) == ("warning", 200)
        metrics = await run.metrics()
        assert metrics[f'warmroute_broken_responses_total{{model="m",replica="{one.name}"}}'] == 1
        assert metrics['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 1


HALF_AN_EVENT = writes(STREAM_HEAD + chunk(event("a") + event("b")[:30]))
NO_END = writes(STREAM_HEAD + chunk(event("a")) + b"0\r\n\r\n")
CLOSED = writes(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + event("a"))


def then_dies(behave: Behaviour) -> Behaviour:
    async def both(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await behave(request, writer)
        await writer.drain()
        writer.write_eof()

    return both


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("broken", [then_dies(HALF_AN_EVENT), NO_END, then_dies(CLOSED)])
async def test_however_a_stream_breaks_off_the_client_gets_an_error(broken: Behaviour, options: dict[str, Any]) -> None:
    async with FakeReplica([broken]) as one, running(one) as run:
        parts = aiter(await run.client.chat.completions.create(**STREAM, **options))
        assert (await anext(parts)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="failed while it answered"):
            await anext(parts)


def begins_with(error: dict[str, Any], cut: int = 1000) -> Behaviour:
    """A stream whose first event is this error, in two pieces."""
    data = b"data: " + json.dumps({"error": {"message": "out of memory", "param": None, **error}}).encode() + b"\n\n" + DONE

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(data[:cut]))
        await writer.drain()
        await asyncio.sleep(0)
        writer.write((chunk(data[cut:]) if data[cut:] else b"") + b"0\r\n\r\n")

    return behave


@pytest.mark.parametrize("cut", [1, 16, 40, 1000])
@pytest.mark.parametrize("error", [{"type": "InternalServerError", "code": 500}, {"type": "server_error", "code": None}])
async def test_a_stream_that_begins_with_the_engines_failure_is_answered_by_another(error: dict[str, Any], cut: int) -> None:
    one, two = FakeReplica([begins_with(error, cut)]), FakeReplica([streams("a", "b")])
    async with one, two, running(one, two, **TURNS) as run:
        assert [await text_of(run) for _ in range(2)] == ["ab", "ab"]
        assert (await run.metrics())['warmroute_retries_total{reason="status"}'] == len(one.requests) > 0


async def test_if_all_streams_begin_with_a_failure_the_client_has_a_plain_error() -> None:
    async with FakeReplica([begins_with({"code": 503})]) as one, running(one) as run:
        status, _, body = await run.post(STREAM)
        assert (status, body["error"]["code"]) == (502, "replica_failed")
        assert "its error: out of memory" in body["error"]["message"]


async def test_a_stream_that_begins_with_the_clients_error_goes_on_as_it_is() -> None:
    one, two = FakeReplica([begins_with({"code": 400})]), FakeReplica([begins_with({"code": 400})])
    async with one, two, running(one, two) as run:
        with pytest.raises(openai.APIError, match="out of memory"):
            await text_of(run)
        assert len(one.requests) + len(two.requests) == 1


async def test_what_may_not_be_sent_twice_is_not() -> None:
    async with FakeReplica([dies]) as one, FakeReplica([dies]) as two, running(one, two) as run:
        code, _, _ = await run.post(b"a file", path="/v1/files", headers={"Content-Type": "text/plain"})
        assert code == 502
        assert len(one.requests) + len(two.requests) == 1
        code, _, _ = await run.post({"model": "m", "input": "x"}, path="/v1/embeddings")
        assert len(one.requests) + len(two.requests) >= 3, "but an embedding may"


async def test_headers_of_the_connection_stay_on_it() -> None:
    answer = http(200, b"{}", "application/json", "Connection: X-A", "Connection: X-B", "X-A: 1", "X-B: 1", "X-C: 1")
    async with FakeReplica([writes(answer)]) as replica, running(replica) as run:
        hops = CIMultiDict([("Connection", "X-A"), ("Connection", "X-B"), ("X-A", "1"), ("X-B", "1"), ("X-C", "1")])
        _, headers, _ = await run.post(headers=hops)
        for seen in (headers, CIMultiDict(replica.requests[0].headers)):
            assert [name in seen for name in ("X-A", "X-B", "X-C")] == [False, False, True]


async def test_a_header_that_chooses_another_cache_reaches_no_replica() -> None:
    """Else two clients could make a warm prompt look cold, and so its replica restarted."""
    async with FakeReplica() as replica, running(replica) as run:
        await run.post(headers={"X-Data-Parallel-Rank": "1"})
        assert "X-Data-Parallel-Rank" not in CIMultiDict(replica.requests[0].headers)


def test_our_own_lack_of_file_descriptors_is_no_replicas_fault() -> None:
    ours = failure_of(OSError(errno.EMFILE, "why"))
    assert isinstance(ours, GatewayError)
    assert (ours.status, ours.code) == (503, "gateway_overloaded")
    for number, reason in ((errno.ECONNREFUSED, "refused"), (errno.EHOSTUNREACH, "unreachable")):
        theirs = failure_of(OSError(number, "why"))
        assert isinstance(theirs, ReplicaFailure)
        assert (theirs.reason, theirs.reached) == (reason, False)


@pytest.mark.parametrize(
    ("second", "reason"), [("[Errno 111] Connect call failed", "refused"), ("[Errno 101] no route", "unreachable")]
)
def test_a_name_with_several_addresses_is_refused_if_all_of_them_refuse(second: str, reason: str) -> None:
    failure = failure_of(OSError(f"Multiple exceptions: [Errno 111] Connect call failed ('::1', 80, 0, 0), {second}"))
    assert isinstance(failure, ReplicaFailure)
    assert failure.reason == reason


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_its_replica(
    streamed: bool, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    never = asyncio.Event()
    behaviour = streams("a", "b", hold=never) if streamed else hangs(never)
    async with FakeReplica([behaviour]) as replica, running(replica) as run:
        body = STREAM if streamed else BODY
        asking = asyncio.create_task(run.session.post(run.url + "/v1/chat/completions", json=body))
        await eventually(lambda: replica.requests)
        if streamed:
            answer = await asking
            await answer.content.readany()
            answer.close()
        else:
            asking.cancel()
        await eventually(lambda: replica.gone == 1)
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        await eventually(request_lines)
        assert request_lines()[0]["status"] == 499
        held = run.gateway.router.trie.held()[replica.name]
        assert (held > 0) is streamed, "what was prefilled is held; what was not, is not"


async def test_a_client_that_leaves_after_the_usage_is_metered(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    never = asyncio.Event()
    last = event("a", usage=usage(100, 1, 64))

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(last))
        await never.wait()

    async with FakeReplica([behave]) as replica, running(replica) as run:
        answer = await run.session.post(run.url + "/v1/chat/completions", json=STREAM)
        assert await answer.content.readany() == last
        answer.close()
        await eventually(request_lines)
        assert (request_lines()[0]["status"], request_lines()[0]["cached_tokens_reported"]) == (499, 64)
        assert (await run.metrics())[f'warmroute_completion_tokens_total{{model="m",replica="{replica.name}"}}'] == 1


async def test_a_silent_replica_that_is_down_is_given_up(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    never = asyncio.Event()
    config = {"timeouts": {"first_byte_s": 1}, "health": {"interval_s": 0.05}, **TURNS}
    async with FakeReplica([hangs(never)]) as silent, FakeReplica() as good, running(silent, good, **config) as run:
        answers = [asyncio.create_task(run.post()) for _ in range(2)]
        await eventually(lambda: silent.requests)
        silent.listing = status(500)
        assert {(await answer)[1]["X-Warmroute-Replica"] for answer in answers} == {good.name}
        failed = [attempt for line in request_lines() for attempt in line.get("failed_attempts", [])]
        assert {attempt["reason"] for attempt in failed} == {"timeout"}


async def test_a_pooled_connection_that_died_idle_is_no_failure(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """The engine closes an idle connection just as the request is written to it."""
    async with FakeReplica([answers(), dies, answers()]) as replica, running(replica) as run:
        assert (await run.post())[0] == 200
        assert (await run.post())[0] == 200, "repeated on a fresh connection, silently"
        assert len(replica.requests) == 3
        assert all("failed_attempts" not in line for line in request_lines())


async def test_conversations_stay_and_the_log_has_what_was_predicted_and_reported(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    prices = {"m": {"input": 2.0, "cached_input": 0.5, "output": 10.0}}
    behaviour = answers(prompt=1000, completion=100, cached=600)
    async with FakeReplica([behaviour]) as one, FakeReplica([behaviour]) as two, running(one, two, prices=prices) as run:
        messages = [{"role": "user", "content": "a long document " * 100}]
        for turn in range(5):
            code, _, body = await run.post({"model": "m", "messages": messages}, headers={"X-Tenant-Id": "acme"})
            assert code == 200
            messages += [body["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        assert sorted([len(one.requests), len(two.requests)]) == [0, 5]
        first, *later = request_lines()
        assert (first["reason"], first["cached_tokens_predicted"]) == ("cold", 0)
        assert all(line["reason"] == "warm" and line["cached_tokens_predicted"] > 100 for line in later)
        assert first["cached_tokens_reported"] == 600
        assert first["cost_usd"] == pytest.approx((400 * 2.0 + 600 * 0.5 + 100 * 10.0) / 1e6)
        assert first["saved_usd"] == pytest.approx(600 * 1.5 / 1e6)
        samples = await run.metrics()
        assert samples['warmroute_cost_usd_total{kind="output",model="m",tenant="acme"}'] == pytest.approx(5 * 1e-3)
        assert samples['warmroute_savings_usd_total{model="m",tenant="acme"}'] == pytest.approx(5 * 9e-4)
        assert samples['warmroute_routing_decisions_total{policy="cost",reason="warm"}'] == 4
        assert samples['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == 5


async def test_other_paths_pass_through_by_load() -> None:
    empty = writes(http(200, b'{"data": []}'))
    async with FakeReplica([empty]) as one, FakeReplica([empty]) as two, running(one, two) as run:
        for path in ("/v1/embeddings", "/detokenize", "/v1/anything"):
            code, _, _ = await run.post({"model": "m", "input": "the same text " * 100}, path=path)
            assert code == 200
        router = run.gateway.router
        assert not router.trie.blocks, "nothing shows that a prompt is in a cache"
        assert [load.booked_tokens for load in router.ledger.loads.values()].count(0) == len(router.ledger.loads)
        async with run.session.delete(run.url + "/v1/files/f-1?q=1") as answer:
            assert answer.status == 200
        assert ("DELETE", "/v1/files/f-1?q=1") in {(sent.method, sent.path) for sent in one.requests + two.requests}


async def test_a_plain_pass_through_that_breaks_off_is_cut_not_completed() -> None:
    async with FakeReplica([dies_in_plain_body]) as replica, running(replica) as run:
        with pytest.raises(aiohttp.ClientError):
            await run.post({"model": "m", "input": "x"}, path="/v1/embeddings")


async def test_an_answer_without_usage_is_counted_as_unmetered() -> None:
    async with FakeReplica([writes(http(200, b'{"choices": []}'))]) as replica, running(replica) as run:
        await run.post()
        assert (await run.metrics())['warmroute_unmetered_requests_total{endpoint="/v1/chat/completions",model="m"}'] == 1


async def test_a_client_that_leaves_after_done_has_had_everything(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """Official clients close at [DONE]; the replica's last chunk may still be on its way."""
    never = asyncio.Event()

    async def never_ends(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")) + chunk(DONE))
        await never.wait()

    async with FakeReplica([never_ends]) as replica, running(replica) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            assert b"[DONE]" in await answer.content.readuntil(DONE)
        await eventually(request_lines)
        assert [(line["status"], line.get("error")) for line in request_lines()] == [(200, None)]


@pytest.mark.parametrize("resume", [True, False])
async def test_nothing_follows_done(resume: bool, request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """The replica dies between [DONE] and its last chunk: the client has everything."""
    dies_at_last = then_dies(writes(STREAM_HEAD + chunk(event("a")) + chunk(DONE)))
    async with FakeReplica([dies_at_last]) as one, running(pools=[{"replicas": [one.url], "resume_streams": resume}]) as run:
        async with run.session.post(run.url + "/v1/chat/completions", json=STREAM) as answer:
            assert await answer.read() == event("a") + DONE
        await eventually(request_lines)
        assert [(line["status"], line.get("error")) for line in request_lines()] == [(200, None)]
        assert (await run.metrics())[f'warmroute_broken_responses_total{{model="m",replica="{one.name}"}}'] == 1


async def test_an_error_has_our_server_header_on_every_path() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for path in ("/v1/chat/completions", "/v1/nothing", "/nothing"):
            _, headers, _ = await run.post({"model": "unknown", "messages": []}, path)
            assert headers["Server"] == "warmroute", path


async def test_a_replicas_id_of_a_request_cannot_be_foreseen_or_claimed(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    """Engines refuse, or end, a second request with an id that runs already."""
    async with FakeReplica() as replica, running(replica) as run:
        answers = [(await run.post(headers=headers))[1]["X-Request-Id"] for headers in ({}, {}, {"X-Request-Id": "mine"})]
        sent = [each.headers["x-request-id"] for each in replica.requests]
        assert answers == [*sent[:2], "mine"]
        assert "mine" not in sent
        assert len({each[:8] for each in sent}) == 3, "nothing of it repeats"
        line = request_lines()[-1]
        assert (line["id"], line["sent_id"]) == ("mine", sent[2])
