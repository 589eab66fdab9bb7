"""Replicas that speak chat only, and clients that speak Messages and Responses: the official ones notice nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.conftest import Running, running
from tests.gateway.request.test_dialects import keeper, message
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
    models,
    status,
    streams,
    writes,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
UNKNOWN = writes(http(404, b'{"detail":"Not Found"}'))
PROMPT_COUNTS = "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
UNCOUNTED = json.dumps(
    {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
).encode()
LONG = "You help with code. " * 200
PRICES = {"m": {"input": 1.0, "output": 2.0, "cached_input": 0.1}}


def chat_only(*good: Behaviour) -> Behaviour:
    """Answers chat with these, one after the other (the last one again and again), and knows no other path."""
    left = list(good)

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if request.path != CHAT:
            await UNKNOWN(request, writer)
        else:
            await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return behave


def claude(run: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=run.url, api_key="secret", max_retries=0)


def hits(page: dict[str, float], replica: FakeReplica) -> float:
    """Cached tokens that were metered."""
    return page[f'warmroute_prompt_tokens_total{{cache="hit",model="m",replica="{replica.name}"}}']


def paths(replica: FakeReplica) -> list[str]:
    return [request.path for request in replica.requests]


async def test_messages_of_a_replica_that_speaks_chat(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    behave = chat_only(answers(prompt=1000, completion=5, cached=900))
    async with FakeReplica([behave]) as replica, running(replica, prices=PRICES) as run, claude(run) as client:
        for _ in range(3):
            said = await client.messages.create(
                model="m", max_tokens=9, system=LONG, messages=[{"role": "user", "content": "hi"}], stop_sequences=["x"]
            )
        assert said.content[0].type == "text"
        assert said.content[0].text == "hello"
        assert (said.stop_reason, said.role, said.type) == ("end_turn", "assistant", "message")
        assert (said.usage.input_tokens, said.usage.cache_read_input_tokens, said.usage.output_tokens) == (100, 900, 5)
        assert paths(replica) == [MESSAGES, CHAT, CHAT, CHAT], "it is asked once whether it speaks the dialect"
        asked = replica.requests[-1]
        assert asked.json["messages"] == [{"role": "system", "content": LONG}, {"role": "user", "content": "hi"}]
        assert (asked.json["max_tokens"], asked.json["stop"]) == (9, ["x"])
        assert asked.headers["authorization"] == "Bearer secret"
        lines = request_lines()
        lines = [line for line in lines if line.get("path") == MESSAGES]
        assert [line["translated"] for line in lines] == [True] * 3
        assert [line["cached_tokens_reported"] for line in lines] == [900] * 3
        assert "failed_attempts" not in lines[0]
        page = await run.metrics()
        assert hits(page, replica) == 2700
        assert not [name for name, value in page.items() if name.startswith("warmroute_retries_total") and value]


async def test_streamed_messages_of_a_replica_that_speaks_chat() -> None:
    behave = chat_only(streams("he", "llo", prompt=1000, completion=5, cached=900))
    async with FakeReplica([behave]) as replica, running(replica) as run, claude(run) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            said = await stream.get_final_message()
        assert said.content[0].type == "text"
        assert said.content[0].text == "hello"
        assert (said.usage.cache_read_input_tokens, said.usage.output_tokens) == (900, 5)
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert replica.requests[-1].json["stream_options"] == {"include_usage": True}
        page = await run.metrics()
        assert hits(page, replica) == 900


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_of_a_replica_that_speaks_chat(stream: bool) -> None:
    counts: Any = {"prompt": 1000, "completion": 5, "cached": 900}
    behave = chat_only(streams("he", "llo", **counts) if stream else answers(**counts))
    async with FakeReplica([behave]) as replica, running(replica) as run:
        if stream:
            async with run.client.responses.stream(model="m", input="hi", instructions=LONG) as events:
                kinds = [event.type async for event in events]
                said = await events.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
        else:
            said = await run.client.responses.create(model="m", input="hi", instructions=LONG)
        assert said.output_text == "hello"
        assert said.usage is not None
        assert said.usage.input_tokens_details.cached_tokens == 900
        assert replica.requests[-1].json["messages"][0] == {"role": "system", "content": LONG}
        page = await run.metrics()
        assert hits(page, replica) == 900


async def test_a_replica_that_speaks_it_gets_the_bytes_of_the_client() -> None:
    async with FakeReplica([message()]) as native, running(native) as run:
        body = b'{"model": "m",  "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "unknown": 1}'
        assert (await run.post(body, path=MESSAGES))[0] == 200
        assert native.requests[0].body == body


async def test_a_retry_goes_from_one_way_of_speaking_to_the_other() -> None:
    async def either(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (UNKNOWN if request.path == MESSAGES else dies)(request, writer)

    async with FakeReplica([either]) as broken, FakeReplica([message()]) as native, running(broken, native) as run:
        for number in range(6):
            body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": f"{number} {LONG}"}]}
            code, _, said = await run.post(body, path=MESSAGES)
            assert (code, said["content"][0]["text"]) == (200, "hello")
        assert broken.requests


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (status(400, "too long"), anthropic.BadRequestError, "invalid_request_error"),
        (status(429, "slow down"), anthropic.RateLimitError, "rate_limit_error"),
        (status(500, "broken"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_errors_have_the_shape_of_the_dialect(
    error: Behaviour, expected: type[anthropic.APIStatusError], kind: str
) -> None:
    async with FakeReplica([chat_only(error)]) as replica, running(replica) as run, claude(run) as client:
        with pytest.raises(expected) as caught:
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == kind
        assert caught.value.body["error"]["message"]


async def test_a_model_that_a_native_replica_does_not_know_is_no_unknown_path() -> None:
    unknown = b'{"type":"error","error":{"type":"not_found_error","message":"The model `m` does not exist."}}'
    async with FakeReplica([writes(http(404, unknown))]) as replica, running(replica) as run:
        code, _, said = await run.post(
            {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}, path=MESSAGES
        )
        assert (code, said["error"]["message"]) == (404, "The model `m` does not exist.")
        assert paths(replica) == [MESSAGES]


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompt_is_counted_from_the_beginning(
    counts: bool, stream: bool, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """Claude Code decides by `message_start` when to compact, and chat engines count in their last event, if at all."""
    silent = streams("hi") if counts else writes(STREAM_HEAD + chunk(event("hi", "stop") + DONE) + b"0\r\n\r\n")
    whole = answers(prompt=77) if counts else writes(http(200, UNCOUNTED))
    body = {"model": "m", "max_tokens": 5, "stream": stream, "messages": [{"role": "user", "content": LONG}]}
    async with FakeReplica([chat_only(silent if stream else whole)]) as replica, running(replica) as run:
        async with run.session.post(f"{run.url}{MESSAGES}", json=body) as answer:
            text = await answer.text()
        estimate = request_lines()[-1]["estimated_prompt_tokens"]
        assert estimate > 500
        if not stream:
            assert sum(json.loads(text)["usage"].get(name, 0) for name in PROMPT_COUNTS) == (77 if counts else estimate)
            return
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        assert events[0]["message"]["usage"] == {"input_tokens": estimate, "output_tokens": 0}
        last = next(each["usage"] for each in events if each["type"] == "message_delta")
        assert (last["input_tokens"] == estimate) != counts


async def test_what_chat_cannot_say_is_a_400_that_names_the_field() -> None:
    async with FakeReplica([chat_only(answers())]) as replica, running(replica) as run, claude(run) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]"):
            await client.messages.create(
                model="m",
                max_tokens=9,
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "web_search_20250305", "name": "web_search"}],
            )
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await run.client.responses.create(model="m", input="hi", previous_response_id="resp_1")
        assert run.gateway.router.ledger.open_leases == 0


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_stream_that_breaks_off_raises_in_the_client(path: str) -> None:
    async with (
        FakeReplica([chat_only(streams("he", "llo", die=True))]) as replica,
        running(replica) as run,
        claude(run) as client,
    ):
        if path == MESSAGES:
            asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(anthropic.APIStatusError):
                async with client.messages.stream(**asked) as stream:
                    await stream.get_final_message()
        else:
            with pytest.raises(openai.APIError):
                async with run.client.responses.stream(model="m", input="hi") as events:
                    await events.get_final_response()


async def test_large_bodies_are_translated_elsewhere() -> None:
    async with FakeReplica([chat_only(answers())]) as replica, running(replica) as run:
        text = "x" * (3 << 20)
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
        code, _, said = await run.post(io.BytesIO(json.dumps(body).encode()), path=MESSAGES)
        assert (code, said["content"][0]["text"]) == (200, "hello")
        assert replica.requests[-1].json["messages"][0]["content"] == text


async def test_an_answer_beyond_the_bound_is_no_answer() -> None:
    large = json.dumps({"choices": [{"message": {"role": "assistant", "content": "x" * (2 << 20)}}]}).encode()
    async with FakeReplica([chat_only(writes(http(200, large)))]) as replica, running(replica) as run:
        code, _, said = await run.post(
            {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}, path=MESSAGES
        )
        assert (code, said["type"]) == (502, "error")


async def test_a_response_that_was_translated_is_not_remembered_as_an_object() -> None:
    async with FakeReplica([chat_only(answers())]) as replica, FakeReplica([keeper("a")] * 9), running(replica) as run:
        assert (await run.post({"model": "m", "input": "hi"}, path=RESPONSES))[0] == 200
        assert len(run.gateway.router.objects) == 0


def sse(*events: bytes) -> Behaviour:
    """A chat stream of these events."""
    head = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    return writes(head % sum(map(len, events)) + b"".join(events))


SAID = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"half"},"finish_reason":null}]}\n\n'
ABORTED = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'


NAMELESS = b'data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}\n\n'
STOPPED = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize(
    "events",
    [
        [SAID, ABORTED],
        [SAID, b'data: {"choi\n\n'],
        [b"data: {oops\n\n"],
        [SAID, DONE],
        [DONE],
        [SAID, NAMELESS, STOPPED, DONE],
    ],
)
async def test_official_clients_raise_if_a_part_of_the_stream_is_missing(events: list[bytes]) -> None:
    async with FakeReplica([chat_only(sse(*events))]) as replica, running(replica) as run, claude(run) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(**asked) as stream:
                await stream.get_final_message()
        for store in (True, False):
            with pytest.raises(openai.APIError):
                async with run.client.responses.stream(model="m", input="hi", store=store) as response:
                    await response.get_final_response()


async def test_a_plain_answer_to_a_stream_becomes_one() -> None:
    async with FakeReplica([chat_only(answers())]) as deaf, running(deaf) as run, claude(run) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with client.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).content[0].text == "hello"  # type: ignore[union-attr]


async def test_an_answer_that_the_engine_gave_up_comes_from_another_replica() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "half"}, "finish_reason": "abort"}
    gave_up = writes(http(200, json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode()))
    async with FakeReplica([chat_only(gave_up)]) as broken, FakeReplica([message()]) as good, running(broken, good) as run:
        for number in range(6):
            body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": f"{number} {LONG}"}]}
            code, _, said = await run.post(body, path=MESSAGES)
            assert (code, said["content"][0]["text"]) == (200, "hello")
        assert broken.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_of_an_engine_with_one_id_for_all_have_their_own(stream: bool) -> None:
    """What is kept is found by its id: the second one would take the place of the first."""
    behave = chat_only(streams("hello") if stream else answers())
    async with FakeReplica([behave]) as replica, running(replica) as run:
        ids = set[str]()
        for _ in range(3):
            if stream:
                async with run.client.responses.stream(model="m", input="hi") as events:
                    said: Any = await events.get_final_response()
            else:
                said = await run.client.responses.create(model="m", input="hi")
            ids |= {said.id, said.output[0].id}
        assert len(ids) == 6


@pytest.mark.parametrize(
    ("owner", "translate", "path", "asked"),
    [
        ("vllm", None, RESPONSES, RESPONSES),
        ("llamacpp", None, RESPONSES, CHAT),  # its own lack fields that typed clients need
        ("llamacpp", None, MESSAGES, MESSAGES),
        ("llamacpp", [], RESPONSES, RESPONSES),
        ("vllm", ["messages"], MESSAGES, CHAT),
        ("vllm", ["messages"], RESPONSES, RESPONSES),
        ("llamacpp", ["messages"], RESPONSES, RESPONSES),
    ],
)
async def test_a_pool_may_want_a_translation(owner: str, translate: list[str] | None, path: str, asked: str) -> None:
    more = {} if translate is None else {"translate": translate}
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    if path == RESPONSES:
        body = {"model": "m", "input": "hi"}
    replica = FakeReplica([answers()], listing=models("m", owner=owner))
    async with replica, running(pools=[{"replicas": [replica.url], **more}]) as run:
        await run.post(body, path)
        assert paths(replica) == [asked]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (MESSAGES, b'"type":"invalid_request_error","message":"prompt is too long: 61709 tokens > 40960 maximum"'),
        (RESPONSES, b'"error":{"code":"context_length_exceeded","message":"The input (61709 tokens)'),
    ],
)
async def test_a_full_context_that_a_stream_reports_has_the_words_of_the_client_s_api(path: str, words: bytes) -> None:
    """SGLang answers 200, and writes the error as the first event."""
    message = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
    error = {"error": {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}}
    says = writes(STREAM_HEAD + chunk(b"data: " + json.dumps(error).encode() + b"\n\n" + DONE) + b"0\r\n\r\n")
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    if path == RESPONSES:
        body = {"model": "m", "input": "hi", "stream": True}
    async with FakeReplica([chat_only(says)]) as replica, running(replica) as run:
        async with run.session.post(f"{run.url}{path}", json=body) as answer:
            assert words in await answer.read()
        assert paths(replica) == [path, CHAT], "asked once"
