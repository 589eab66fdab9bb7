"""Signs of life for clients that wait for a stream, over sockets. What is to come later waits for what the client has read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.admission.pool_queue import MAX_PLACE, Admission
from gateway.dialects.table import DIALECTS
from gateway.request.pulses import AT_ONCE, EVENT_COUNTERS, ordinal
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_dialects import (
    ASKED,
    BEGUN,
    CHAT,
    COMPLETED,
    CREATED,
    DELTA,
    ENDS,
    MESSAGES,
    RESPONSES,
    SAYS,
    events,
    message,
    response,
)
from tests.gateway.request.test_robust import dial, post, read_answer, unread
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    event,
    http,
    status,
    streams,
    writes,
)

COMPLETION = "/v1/completions"
OFTEN: dict[str, Any] = {"limits": {"keepalive_s": 0.02, "drain_timeout_s": 1}}
RARELY: dict[str, Any] = {"limits": {"keepalive_s": 3600, "drain_timeout_s": 1}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi " * 300}], "stream": True},
    COMPLETION: {"model": "m", "prompt": "hi " * 300, "stream": True},
    MESSAGES: {**ASKED, "stream": True},
    RESPONSES: {"model": "m", "input": "hi", "stream": True},
}
TEXT = b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"hello"'
STREAMS: dict[str, tuple[bytes, ...]] = {
    CHAT: (event("hello"), event("", "stop"), DONE),
    COMPLETION: (TEXT + b',"finish_reason":"stop"}]}\n\n', DONE),
    MESSAGES: (BEGUN + SAYS, ENDS),
    RESPONSES: (CREATED, DELTA, COMPLETED),
}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
KEEPALIVE = b'event: keepalive\ndata: {"type":"keepalive"}\n\n'
CODEX = {"Originator": "codex_cli_rs", "User-Agent": "codex_cli_rs/0.171.0 (Linux)"}
Lines = Callable[[], list[dict[str, Any]]]


def once(go: asyncio.Event, then: Behaviour) -> Behaviour:
    """Behaves so, once the event is set."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await then(request, writer)

    return behave


class Told:
    """What a client was told: the first pulse, then everything behind it."""

    def __init__(self, answer: aiohttp.ClientResponse, first: bytes, rest: bytes) -> None:
        self.status, self.headers, self.first, self.rest = answer.status, answer.headers, first, rest

    @property
    def events(self) -> bytes:
        """Without the pulses."""
        kept = [part for part in self.rest.split(b"\n\n") if part and part + b"\n\n" != PING and not part.startswith(b": ")]
        return b"".join(part + b"\n\n" for part in kept)

    @property
    def error(self) -> dict[str, Any]:
        """The last event with a data object, which is to be an error."""
        found = [json.loads(line[6:]) for line in self.events.splitlines() if line.startswith(b"data: {")]
        return dict(found[-1])


async def told(run: Running, path: str, go: asyncio.Event, **headers: str) -> Told:
    """Read a pulse, then set the event, then read all."""
    async with run.session.post(run.url + path, json=BODIES[path], headers=headers) as answer:
        first = await answer.content.readuntil(b"\n\n")
        go.set()
        return Told(answer, first, await answer.read())


def is_pulse(path: str, data: bytes) -> bool:
    return data == PING if path == MESSAGES else data.startswith(b": ")


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_waits_for_the_prefill_gets_pulses(path: str, request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, events(*STREAMS[path])), events(*STREAMS[path])]) as replica:
        async with running(replica, **OFTEN) as run:
            found = await told(run, path, go)
            assert (found.status, is_pulse(path, found.first)) == (200, True)
            assert found.headers["Content-Type"] == "text/event-stream"
            assert (found.headers["Cache-Control"], found.headers["X-Accel-Buffering"]) == ("no-cache", "no")
            assert found.headers["X-Request-Id"]
            assert ("Request-Id" in found.headers) is (path == MESSAGES)
        async with (
            running(replica, **RARELY) as run,
            run.session.post(run.url + path, json=BODIES[path]) as answer,
        ):
            assert found.events == await answer.read()
    pulsed, silent = request_lines()
    assert pulsed["pulses"] >= 1
    assert "pulses" not in silent
    assert (pulsed["status"], pulsed["completion_tokens"]) == (200, silent["completion_tokens"])
    assert pulsed["ttft_s"] > 0.02


async def test_a_comment_says_what_is_computed() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, streams("hello"))]) as replica, running(replica, **OFTEN) as run:
        found = await told(run, CHAT, go)
        assert found.first == b": computing 227 tokens\n\n"  # no rate is known yet, and so no time


async def test_others_do_not_learn_what_is_cached() -> None:
    go = asyncio.Event()
    async with FakeReplica([streams("hello"), once(go, streams("hello"))]) as replica, running(replica, **OFTEN) as run:
        async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer:
            await answer.read()
        found = await told(run, CHAT, go, **{"X-Forwarded-For": "10.0.0.9"})
        assert found.first.startswith(b": computing a prompt of ")


async def test_a_client_gets_pulses_in_the_queue(request_lines: Lines) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    script = [once(first, streams("one")), once(second, streams("two"))]
    async with FakeReplica(script) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1}]
        async with running(replica, pools=pools, **OFTEN) as run:
            one = asyncio.create_task(run.session.post(run.url + CHAT, json=BODIES[CHAT]).__aenter__())
            await eventually(lambda: replica.requests)
            async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer:
                assert await answer.content.readuntil(b"\n\n") == b": queued 1st\n\n"
                first.set()
                await (await one).read()
                while not (await answer.content.readuntil(b"\n\n")).startswith(b": computing"):
                    pass
                second.set()
                assert b'"two"' in await answer.read()
                assert "Server-Timing" not in answer.headers  # its head was sent before
    assert [line["status"] for line in request_lines()] == [200, 200]
    assert request_lines()[1]["queued_s"] > 0


async def test_the_time_in_the_queue_is_in_the_head() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers("one")), answers("two")]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1}]
        async with running(replica, pools=pools, **RARELY) as run:
            one = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            two = asyncio.create_task(run.post())
            await eventually(lambda: run.gateway.fleet.target("m").admission.waiting)
            go.set()
            assert "Server-Timing" not in (await one)[1]
            name, _, value = (await two)[1]["Server-Timing"].partition(";dur=")
            assert name == "queue"
            assert float(value) > 0


async def test_the_refusal_of_the_queue_has_its_time() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers("one"))]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 0.05}]
        async with running(replica, pools=pools, **RARELY) as run:
            one = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            code, headers, _ = await run.post()
            assert (code, headers["Server-Timing"].partition("=")[0]) == (429, "queue;dur")
            go.set()
            await one


async def test_another_replica_answers_after_the_head(request_lines: Lines) -> None:
    go = asyncio.Event()
    script = [once(go, dies), dies, streams("hello")]  # a used connection is replaced once
    asked: list[FakeRequest] = []
    first, second = FakeReplica(script, requests=asked), FakeReplica(script, requests=asked)
    async with first as one, second as two, running(one, two, **OFTEN) as run:
        found = await told(run, CHAT, go)
        assert b'"hello"' in found.events
        assert found.events.endswith(DONE)
    (line,) = request_lines()
    assert (line["status"], len(line["failed_attempts"]), len(asked)) == (200, 1, 3)


async def test_the_fallback_pool_answers_after_the_head(request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, status(500))]) as one, FakeReplica([streams("hello")]) as two:
        pools = [
            {"name": "big", "models": ["m"], "replicas": [one.url], "fallback": "small"},
            {"name": "small", "models": ["other"], "replicas": [two.url]},
        ]
        async with running(one, pools=pools, **OFTEN) as run:
            assert b'"hello"' in (await told(run, CHAT, go)).events
    assert request_lines()[0]["fallback"] == "big -> small"


FULL = status(400, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.")
KINDS = {CHAT: "invalid_request_error", COMPLETION: "invalid_request_error", MESSAGES: "invalid_request_error"}


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_of_the_replica_after_the_head_is_an_event(path: str, request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, status(400, "no such tool"))]) as replica, running(replica, **OFTEN) as run:
        found = await told(run, path, go)
        assert found.status == 200
        error = found.error["error"]
        assert error["message"] == "no such tool"
        assert error["type"] == ("invalid_request_error" if path == MESSAGES else "t")  # Anthropic's, else the replica's own
        assert error.get("status") == (None if path == MESSAGES else 400)
        if path in (MESSAGES, RESPONSES):
            assert found.events.startswith(b"event: error\n")
        else:
            assert found.events.endswith(DONE)
        codes = {name: value for name, value in (await run.metrics()).items() if name.startswith("warmroute_requests_total{")}
        assert ['code="400"' in name for name, value in codes.items() if value] == [True]
    (line,) = request_lines()
    assert (line["status"], line["completion_tokens"]) == (400, None)
    assert "no such tool" in line["error"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES])
@pytest.mark.parametrize("nested", [True, False], ids=["vLLM", "SGLang"])
async def test_an_event_has_the_members_of_the_replicas_error_and_its_status(path: str, nested: bool) -> None:
    go, error = asyncio.Event(), {"message": "busy", "type": "RateLimit", "param": None, "code": 429, "wait": 3}
    body = json.dumps({"error": error} if nested else error).encode()
    async with FakeReplica([once(go, writes(http(429, body)))]) as replica, running(replica, **OFTEN) as run:
        assert (await told(run, path, go)).error["error"] == {**error, "status": 429}


async def test_a_full_context_after_the_head_is_said_in_the_words_of_the_client(request_lines: Lines) -> None:
    go, then = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(go, FULL), once(then, FULL)]) as replica, running(replica, **OFTEN) as run:
        message = (await told(run, MESSAGES, go)).error["error"]["message"]
        assert message.startswith("prompt is too long: ")
        assert (await told(run, CHAT, then)).error["error"]["code"] == "context_length_exceeded"
    assert [line["status"] for line in request_lines()] == [400, 400]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_of_the_gateway_after_the_head_is_an_event(path: str, request_lines: Lines) -> None:
    """The time in the queue is over, though slots have come free quickly before: 429."""
    held, go = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(held, answers())]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 1}]
        async with running(replica, pools=pools, **OFTEN) as run:
            admission = run.gateway.fleet.target("m").admission
            for _ in range(100):
                permit = admission.try_admit()
                assert permit
                permit.release()
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            found = await told(run, path, go)
            held.set()
            await first
    error = found.error["error"]
    assert "waited too long" in error["message"]
    assert error["type"] == "rate_limit_error"  # by which AI SDK, too, repeats it
    assert path == MESSAGES or (error["code"], error["status"]) == ("queue_timeout", 429)
    line = request_lines()[0]
    assert (line["status"], line["stream"], "waited too long" in line["error"]) == (429, True, True)


@pytest.mark.parametrize("keepalive_s", [0.02, 0])
async def test_a_stream_waits_for_longer_in_the_queue_if_it_gets_signs_of_life(keepalive_s: float) -> None:
    held = asyncio.Event()
    async with FakeReplica([once(held, answers()), streams("a")]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1}]
        async with running(pools=pools, limits={"keepalive_s": keepalive_s}) as run:
            admission = run.gateway.fleet.target("m").admission
            admission.resize(max_inflight=1, max_queue=9, queue_s=0.2, stream_queue_s=3600)
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)

            async def ask() -> tuple[int, str]:
                async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer:
                    return answer.status, await answer.text()

            stream = asyncio.create_task(ask())
            await eventually(lambda: admission.waiting == 1)
            assert (await run.post())[0] == 429
            if not keepalive_s:
                assert (await stream)[0] == 429
            held.set()
            await first
            if keepalive_s:
                status, text = await stream
                assert (status, ": queued 1st" in text, "[DONE]" in text) == (200, True, True)


@contextlib.asynccontextmanager
async def crowded(run: Running) -> AsyncIterator[Admission]:
    """So many wait in the pool's queue that nobody behind them gets a slot in the 60 s of `queue_s`."""
    pool = run.gateway.fleet.target("m").admission
    others = [asyncio.create_task(pool.wait("none", 0)) for _ in range(MAX_PLACE)]
    await eventually(lambda: pool.waiting == MAX_PLACE)
    try:
        yield pool
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.parametrize("path", BODIES)
async def test_a_hopeless_wait_is_refused_in_the_head(path: str, request_lines: Lines) -> None:
    """Instead of the first pulse."""
    held = asyncio.Event()
    async with FakeReplica([once(held, answers())]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 60}]
        async with running(replica, pools=pools, **OFTEN) as run:
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            async with crowded(run), run.session.post(run.url + path, json=BODIES[path]) as answer:
                assert (answer.status, int(answer.headers["Retry-After"]) >= 2) == (429, True)
                assert answer.headers["Server-Timing"].startswith("queue;dur=")
                assert "would wait too long" in (await answer.json())["error"]["message"]
            held.set()
            await first
    line = request_lines()[0]
    assert (line["status"], "pulses" in line) == (429, False)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_official_clients_repeat_what_is_refused_in_the_head(path: str) -> None:
    """They wait as Retry-After says, and have the answer at the second attempt. After an event they would repeat nothing."""
    held, body = asyncio.Event(), {name: value for name, value in BODIES[path].items() if name != "stream"}
    async with FakeReplica([once(held, answers()), events(*STREAMS[path])]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 60}]
        async with running(replica, pools=pools, **OFTEN) as run:
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            sdk: Any = (anthropic.AsyncAnthropic if path == MESSAGES else openai.AsyncOpenAI)(
                base_url=run.url if path == MESSAGES else run.url + "/v1", api_key="k", max_retries=1
            )
            async with sdk as client:
                api = client.messages if path == MESSAGES else client.chat.completions
                async with crowded(run) as pool:
                    asked = asyncio.ensure_future(api.create(**body, stream=True))
                    await eventually(lambda: pool.refused["queue_timeout"])
                held.set()
                await first
                assert [each async for each in await asked]


async def test_a_time_limit_ends_a_stream_with_pulses(request_lines: Lines) -> None:
    never, go, limit = asyncio.Event(), asyncio.Event(), {"total_s": 0.3}
    async with FakeReplica([once(never, answers())]) as replica, running(replica, timeouts=limit, **OFTEN) as run:
        found = await told(run, CHAT, go)
        assert found.error["error"]["code"] == "timeout"
        never.set()
    assert request_lines()[0]["status"] == 504


async def test_an_engine_that_pings_for_ever_is_bounded_by_the_time_limit() -> None:
    async def pings(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while not writer.is_closing():
            writer.write(chunk(b": ping\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async with FakeReplica([pings]) as replica:
        async with running(replica, timeouts={"total_s": 0.3}, **OFTEN) as run:
            found = await told(run, CHAT, asyncio.Event())
            assert found.error["error"]["code"] == "timeout"
        await eventually(lambda: replica.gone)


async def test_a_shutdown_after_the_head_is_an_event(request_lines: Lines) -> None:
    never, go = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica:
        async with running(replica, **OFTEN) as run, run.session.post(run.url + MESSAGES, json=BODIES[MESSAGES]) as answer:
            await answer.content.readuntil(b"\n\n")
            await run.gateway.running.wait(0.0, go)
            assert b"shutting down" in await answer.read()
        never.set()
    assert request_lines()[0]["status"] == 503


# -- answers that are no stream

PLAIN: dict[str, Behaviour] = {
    CHAT: answers("hello"),
    MESSAGES: message(),
    RESPONSES: writes(http(200, json.dumps(response()).encode())),
}


@pytest.mark.parametrize("path", PLAIN)
async def test_a_plain_answer_after_the_head_becomes_a_stream(path: str, request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, PLAIN[path])]) as replica, running(replica, **OFTEN) as run:
        task = asyncio.create_task(sdk_events(run, path))
        await eventually(lambda: any(client.pulses for client in run.gateway.pulses.clients))
        go.set()
        found = await task
    assert "hello" in json.dumps(found)
    (line,) = request_lines()
    assert (line["status"], line["completion_tokens"], line["cached_tokens_reported"]) == (200, 4, None if path == CHAT else 89)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_translated_answer_after_the_head(path: str, request_lines: Lines) -> None:
    """Of a replica that knows chat only: a plain answer becomes a stream, an error its event."""
    plain, wrong = asyncio.Event(), asyncio.Event()
    script = chat_only(once(plain, answers("hello")), once(wrong, status(400, "no such tool")))
    async with FakeReplica([script]) as replica, running(replica, **OFTEN) as run:
        found = await told(run, path, plain)
        assert b'"hello"' in found.events
        assert found.events.rstrip().rpartition(b"event: ")[2].startswith((b"message_stop", b"response.completed"))
        assert (await told(run, path, wrong)).error["error"]["message"] == "no such tool"
    assert [(line["status"], line["completion_tokens"], line["translated"]) for line in request_lines()] == [
        (200, 4, True),
        (400, None, True),
    ]


LARGE = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "a" * (3 << 20)}}]}).encode()


@pytest.mark.parametrize("answer", [http(200, LARGE), http(200, b'{"choices": []}'), http(302, b"{}"), http(204, b"")])
async def test_an_answer_without_a_form_as_a_stream_is_an_error(answer: bytes, request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, writes(answer))]) as replica, running(replica, **OFTEN) as run:
        assert (await told(run, CHAT, go)).error["error"]["code"] == "replica_failed"
    (line,) = request_lines()
    assert (line["status"], line["completion_tokens"]) == (502, None)


async def test_a_bug_after_the_head_is_an_event(request_lines: Lines) -> None:
    go = asyncio.Event()

    def fails(_exchange: object) -> None:
        raise RuntimeError("a bug")

    async with FakeReplica([once(go, answers())]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1}]
        async with running(replica, pools=pools, **OFTEN) as run:
            run.gateway.extensions.waited.append(fails)
            first = asyncio.create_task(run.post())
            await eventually(lambda: replica.requests)
            assert (await told(run, CHAT, go)).error["error"]["code"] == "internal_error"
            await first
    assert 500 in [line["status"] for line in request_lines()]


# -- official clients


async def sdk_events(run: Running, path: str) -> list[Any]:
    """The events that the official client reads, as it understands them."""
    body = {name: value for name, value in BODIES[path].items() if name != "stream"}
    if path == MESSAGES:
        http_client = anthropic.DefaultAsyncHttpxClient(verify=False)
        sdk = anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0, http_client=http_client)
        async with sdk as client, client.messages.stream(**body) as stream:
            found = [each.model_dump(warnings=False) async for each in stream]
            return [*found, (await stream.get_final_message()).model_dump(warnings=False)]
    if path == RESPONSES:
        async with run.client.responses.stream(**body) as stream:
            found = [each.model_dump(warnings=False) async for each in stream]
            return [*found, (await stream.get_final_response()).model_dump(warnings=False)]
    api: Any = run.client.chat.completions if path == CHAT else run.client.completions
    return [each.model_dump(warnings=False) async for each in await api.create(**body, stream=True)]


@pytest.mark.parametrize("path", BODIES)
async def test_official_clients_read_the_same_events_with_pulses(path: str) -> None:
    """Before the first event, and between two events before and after the first token."""
    waits = [asyncio.Event() for _ in STREAMS[path]]

    async def slow(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        for place, part in enumerate(STREAMS[path]):
            await waits[place].wait()
            writer.write((b"" if place else STREAM_HEAD) + chunk(part))
        writer.write(b"0\r\n\r\n")

    async with FakeReplica([slow, events(*STREAMS[path])]) as replica:
        async with running(replica, **OFTEN) as run:
            task = asyncio.create_task(sdk_events(run, path))
            await eventually(lambda: run.gateway.pulses.clients)
            (client,) = run.gateway.pulses.clients
            for go in waits:
                before = client.pulses
                await eventually(lambda before=before: client.pulses > before)  # type: ignore[misc]
                go.set()
            with_pulses = await task
        async with running(replica, **RARELY) as run:
            assert with_pulses == await sdk_events(run, path)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_official_clients_raise_at_an_error_after_the_head(path: str) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, status(400, "no such tool"))]) as replica, running(replica, **OFTEN) as run:
        task = asyncio.create_task(sdk_events(run, path))
        await eventually(lambda: any(client.pulses for client in run.gateway.pulses.clients))
        go.set()
        with pytest.raises((openai.APIError, anthropic.APIError), match="no such tool"):
            await task


# -- within a stream


async def test_no_pulse_divides_an_event_or_follows_the_end() -> None:
    """An event of more than 1 MiB passes in pieces; and a replica may keep its connection open after [DONE]."""
    begun, ended, other = asyncio.Event(), asyncio.Event(), asyncio.Event()
    whole = event("hello") + event("a" * (3 << 20), "stop") + DONE
    half = len(whole) // 2

    async def slow(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(whole[:half]))
        await begun.wait()
        writer.write(chunk(whole[half:]))
        await ended.wait()
        writer.write(b"0\r\n\r\n")

    async with (
        FakeReplica([slow, once(other, streams("b"))]) as replica,
        running(replica, **OFTEN) as run,
        run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer,
    ):
        (first,) = run.gateway.pulses.clients
        received = await answer.content.readexactly(1 << 20)
        async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as second:
            (other_one,) = [client for client in run.gateway.pulses.clients if client is not first]

            async def further_pulses() -> None:
                before = other_one.pulses
                await eventually(lambda: other_one.pulses > before + 2)

            await further_pulses()
            begun.set()
            while not received.endswith(DONE):
                received += await answer.content.readany()
            await further_pulses()
            ended.set()
            other.set()
            await second.read()
        assert await answer.read() == b""
        assert re.sub(rb"(?:\A|(?<=\n\n)): [^\n]*\n\n", b"", received) == whole


# -- who gets none


async def test_codex_gets_no_head_before_the_replica() -> None:
    go, other = asyncio.Event(), asyncio.Event()
    script = [once(go, events(*STREAMS[RESPONSES])), once(other, events(*STREAMS[RESPONSES]))]
    async with FakeReplica(script) as replica, running(replica, **OFTEN) as run:
        codex = asyncio.create_task(run.session.post(run.url + RESPONSES, json=BODIES[RESPONSES], headers=CODEX).__aenter__())
        await eventually(lambda: replica.requests)
        async with run.session.post(run.url + RESPONSES, json=BODIES[RESPONSES]) as answer:
            for _ in range(3):  # of a request that came later
                assert is_pulse(RESPONSES, await answer.content.readuntil(b"\n\n"))
            assert not codex.done()
            go.set()
            found = await (await codex).read()
            assert found.replace(KEEPALIVE, b"") == b"".join(STREAMS[RESPONSES])
            other.set()
            await answer.read()


@pytest.mark.parametrize("begin", [b"", CREATED], ids=["comments", "opened"])
async def test_codex_gets_events_whatever_the_replica_sends_before_its_first_token(begin: bytes) -> None:
    """Its time runs from the last event on; comments are none."""
    go = asyncio.Event()

    async def alive(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + (chunk(begin) if begin else b""))
        while not go.is_set():
            writer.write(chunk(b": alive\n\n"))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"".join(map(chunk, STREAMS[RESPONSES])) + b"0\r\n\r\n")

    async with (
        FakeReplica([alive]) as replica,
        running(replica, **OFTEN) as run,
        run.session.post(run.url + RESPONSES, json=BODIES[RESPONSES], headers=CODEX) as answer,
    ):
        received = b""
        while received.count(KEEPALIVE) < 2:
            received += await answer.content.readany()
            assert not answer.content.at_eof()
        go.set()
        received += await answer.read()
    left = received.replace(KEEPALIVE, b"").replace(b": alive\n\n", b"")
    assert left == begin + b"".join(STREAMS[RESPONSES])


@pytest.mark.parametrize(("name", "begin"), EVENT_COUNTERS["Codex"].items())
async def test_codex_is_known_by_each_of_its_headers(name: str, begin: str) -> None:
    go, other = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(go, streams("a")), once(other, streams("b"))]) as replica, running(replica, **OFTEN) as run:
        sent = {"User-Agent": "x", name: f"{begin.title()}_vscode/1"}
        codex = asyncio.create_task(run.session.post(run.url + CHAT, json=BODIES[CHAT], headers=sent).__aenter__())
        await eventually(lambda: replica.requests)
        await told(run, CHAT, other)
        assert not codex.done()
        go.set()
        await (await codex).read()


async def test_zero_turns_pulses_off() -> None:
    go = asyncio.Event()
    limits = {"keepalive_s": 0, "drain_timeout_s": 1}
    async with FakeReplica([once(go, streams("hello"))]) as replica, running(replica, limits=limits) as run:
        task = asyncio.create_task(run.session.post(run.url + CHAT, json=BODIES[CHAT]).__aenter__())
        await eventually(lambda: replica.requests)
        assert not run.gateway.pulses.clients
        go.set()
        assert b": " not in (await (await task).read()).replace(b": {", b"").replace(b'": ', b"").replace(b"data: ", b"")


async def test_a_shorter_time_in_a_changed_configuration_is_for_all_from_the_next_request_on() -> None:
    go, other = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(go, streams("a")), once(other, streams("b"))]) as replica, running(replica, **RARELY) as run:
        task = asyncio.create_task(told(run, CHAT, go))
        await eventually(lambda: replica.requests)
        await reload(run, replica, **OFTEN)
        assert is_pulse(CHAT, (await told(run, CHAT, other)).first)
        assert is_pulse(CHAT, (await task).first)


async def test_a_plain_request_is_not_watched() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, running(replica, **OFTEN) as run:
        task = asyncio.create_task(run.post())
        await eventually(lambda: replica.requests)
        assert not run.gateway.pulses.clients
        go.set()
        assert (await task)[0] == 200


async def test_bytes_of_the_replica_count_as_pulses() -> None:
    go, end = asyncio.Event(), asyncio.Event()
    ping = b": the engine's own\n\n"

    async def pings(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(ping))
        await go.wait()
        writer.write(chunk(ping))
        await end.wait()
        writer.write(chunk(event("hello", "stop") + DONE) + b"0\r\n\r\n")

    async with FakeReplica([pings]) as replica, running(replica, **RARELY) as run:
        async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer:
            (client,) = run.gateway.pulses.clients
            times = [client.begun]
            for then in (go, end):
                assert await answer.content.readuntil(b"\n\n") == ping
                times.append(client.served_at())
                assert times[-1] > times[-2]
                then.set()
            await answer.read()
        await eventually(lambda: not run.gateway.pulses.clients)


# -- clients that leave, or do not read


@pytest.mark.parametrize("queued", [False, True])
async def test_a_client_that_leaves_between_pulses_ends_its_request(queued: bool, request_lines: Lines) -> None:
    held, never = asyncio.Event(), asyncio.Event()
    async with FakeReplica([once(held if queued else never, streams("a")), once(never, streams("b"))]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1 if queued else 9}]
        async with running(replica, pools=pools, **OFTEN) as run:
            first = asyncio.create_task(run.session.post(run.url + CHAT, json=BODIES[CHAT]).__aenter__()) if queued else None
            await eventually(lambda: replica.requests or not queued)
            async with dial(run) as (reader, writer):
                writer.write(post(json.dumps(BODIES[CHAT]).encode()))
                await reader.readuntil(b"\n\n")
            admission = run.gateway.fleet.target("m").admission
            await eventually(lambda: admission.waiting == 0 and (queued or replica.gone == 1))
            held.set()
            if first:
                await (await first).read()
        never.set()
    line = request_lines()[0]
    assert (line["status"], line["pulses"] >= 1) == (499, True)


async def test_a_client_that_does_not_read_gets_no_more_pulses() -> None:
    """Its bytes wait in the gateway, and pulses to others go on."""
    go, other, filled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def fills(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(400):
            writer.write(chunk(b": " + b"a" * 60_000 + b"\n\n"))
        filled.set()
        await go.wait()

    async with FakeReplica([fills, once(other, streams("b"))]) as replica, running(replica, **OFTEN) as run:
        async with unread(run, post(json.dumps(BODIES[CHAT]).encode())):
            await filled.wait()
            (client,) = run.gateway.pulses.clients
            await eventually(lambda: not client.reads)
            async with run.session.post(run.url + CHAT, json=BODIES[CHAT]) as answer:
                while not client.reads:  # the kernel may still take some
                    before = client.pulses
                    for _ in range(5):
                        await answer.content.readuntil(b"\n\n")
                    if client.pulses == before:
                        break
                assert not client.reads
                assert client.pulses == before
                other.set()
                await answer.read()
        go.set()


async def test_many_clients_get_their_pulses_in_turns() -> None:
    go, count = asyncio.Event(), 3 * AT_ONCE
    connector = aiohttp.TCPConnector(limit=0, resolver=aiohttp.ThreadedResolver())
    async with (
        FakeReplica([once(go, streams("hello"))]) as replica,
        running(replica, limits={"keepalive_s": 0.0001, "drain_timeout_s": 1}) as run,  # the first ones are due again at once
        aiohttp.ClientSession(connector=connector) as run.session,
    ):
        clients = [asyncio.create_task(told(run, COMPLETION, asyncio.Event())) for _ in range(count)]
        await eventually(lambda: sum(client.pulses > 0 for client in run.gateway.pulses.clients) == count)
        go.set()
        for found in await asyncio.gather(*clients):
            assert is_pulse(COMPLETION, found.first)


async def test_a_comment_says_how_long_the_prefill_takes_once_that_is_known() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, streams("hello"))]) as replica, running(replica, **OFTEN) as run:
        rate = run.gateway.router.ledger.rates.of(replica.name)
        for _ in range(9):
            rate.learn(2000, 200.0)  # ten tokens in a second
        found = await told(run, CHAT, go)
        assert re.fullmatch(rb": computing 227 tokens, about 2[0-9] s\n\n", found.first), found.first


async def test_a_connection_is_reused_after_pulses() -> None:
    go = asyncio.Event()
    script = [once(go, streams("one")), streams("two")]
    async with FakeReplica(script) as replica, running(replica, **OFTEN) as run, dial(run) as (reader, writer):
        writer.write(post(json.dumps(BODIES[CHAT]).encode()) * 2)
        await eventually(lambda: any(client.pulses for client in run.gateway.pulses.clients))
        go.set()
        for text in (b'"one"', b'"two"'):
            code, _, body = await read_answer(reader)
            assert (code, text in body) == (200, True)


def test_what_each_api_gets() -> None:
    assert {path for path, dialect in DIALECTS.items() if dialect.pulsed} == set(BODIES)
    assert {DIALECTS[path].pulse("queued 3rd") for path in BODIES} == {PING, b": queued 3rd\n\n"}
    assert DIALECTS[RESPONSES].pulse("queued 3rd", event=True) == KEEPALIVE


def test_ordinals() -> None:
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 101)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "101st"),
    ]
