"""Good answers in another wrapping than was asked for: the client gets them, and no other replica computes them again."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.lenient import read_json
from gateway.errors import GatewayError
from gateway.request.attempts import MAX_HELD_ANSWER
from gateway.request.inflated import MEMBERS, MOST, SEARCHED, AnswerInflater, inflated_begin
from tests.gateway.conftest import running
from tests.support.fakes import DONE, Behaviour, FakeReplica, FakeRequest, event, http, status, usage, writes

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURNS = {"routing": {"policy": "round_robin"}}
QUESTION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "store": False}
EVENTS = event("Par") + event("is", "stop") + event(usage=usage(10, 2)) + DONE
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
Lines = Callable[[], list[dict[str, Any]]]


def whole(**message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Paris", **message}, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage(10, 2)}


def parts(data: bytes) -> list[bytes]:
    return [data[at : at + 50] for at in range(0, len(data), 50)]


def chat_only(answer: bytes) -> Behaviour:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await (writes(answer) if request.path.endswith(CHAT) else status(404, "Not Found"))(request, writer)

    return behave


async def asked(path: str, stream: bool, behaviour: Behaviour) -> tuple[int, str, bytes]:
    """(status, content type, body) where two replicas behave so; each request is computed once."""
    body = {**QUESTION, "stream": stream, **({"input": "hi"} if path == RESPONSES else {})}
    async with FakeReplica([behaviour]) as one, FakeReplica([behaviour]) as two, running(one, two, **TURNS) as run:
        async with run.session.post(run.url + path, json=body) as answer:
            found = answer.status, answer.content_type, await answer.read()
        computed = [each for replica in (one, two) for each in replica.requests if each.path.endswith(CHAT) or path != MESSAGES]
        assert len(computed) == 1
    return found


WRAPPED = {
    "text": (http(200, EVENTS, "text/plain; charset=utf-8"), True),
    "json": (http(200, EVENTS, "application/json"), True),
    "mark": (http(200, b"\xef\xbb\xbf" + EVENTS, "text/event-stream"), True),
    "untyped": (http(200, b": hi\n\n" + EVENTS, ""), True),
    "unasked stream": (http(200, EVENTS, "text/event-stream"), False),
    "object for a stream": (http(200, json.dumps(whole(), indent=1).encode()), True),
    "object typed as a stream": (http(200, json.dumps(whole()).encode(), "text/event-stream"), True),
    "plain mark": (http(200, b"\xef\xbb\xbf" + json.dumps(whole()).encode()), False),
    "infinity": (http(200, json.dumps(whole(x=float("-inf"))).encode()), False),
    "surrogate": (http(200, json.dumps(whole(x="\ud83d")).encode()), False),
    "created": (http(201, json.dumps(whole()).encode()), False),
    "changed by a proxy": (http(203, json.dumps(whole()).encode()), False),
    "stream changed by a proxy": (http(203, EVENTS, "text/event-stream"), True),
    "no utf-8": (http(200, json.dumps(whole()).encode().replace(b'"model"', b'"\xff"')), False),
    "gzip stream": (http(200, gzip.compress(EVENTS), "text/event-stream", "Content-Encoding: gzip"), True),
    "gzip": (http(200, gzip.compress(json.dumps(whole()).encode()), "application/json", "Content-Encoding: gzip"), False),
    "deflate": (http(200, zlib.compress(json.dumps(whole()).encode()), "application/json", "Content-Encoding: deflate"), False),
    "gzip object": (http(200, gzip.compress(json.dumps(whole()).encode()), "application/json", "Content-Encoding: gzip"), True),
    "gzip text": (http(200, gzip.compress(EVENTS), "text/plain", "Content-Encoding: gzip"), True),
    "gzip untyped": (http(200, gzip.compress(b": hi\n\n" + EVENTS), "application/json", "Content-Encoding: gzip"), True),
    "gzip typed as a stream": (
        http(200, gzip.compress(json.dumps(whole()).encode()), "text/event-stream", "Content-Encoding: gzip"),
        True,
    ),
    "gzip members": (
        http(200, gzip.compress(EVENTS[:70]) + gzip.compress(EVENTS[70:]), "text/event-stream", "Content-Encoding: gzip"),
        True,
    ),
    "gzip plain members": (
        http(200, b"".join(map(gzip.compress, parts(json.dumps(whole()).encode()))), "", "Content-Encoding: gzip"),
        False,
    ),
    "gzip mark": (
        http(200, gzip.compress(b"\xef\xbb\xbf" + json.dumps(whole()).encode()), "", "Content-Encoding: gzip"),
        False,
    ),
    "gzip unasked text": (http(200, gzip.compress(EVENTS), "text/plain", "Content-Encoding: gzip"), False),
    "gzip unasked": (http(200, gzip.compress(EVENTS), "text/event-stream", "Content-Encoding: gzip"), False),
}


@pytest.mark.parametrize("kind", WRAPPED)
async def test_a_chat_client_gets_it_as_it_is(kind: str, request_lines: Lines) -> None:
    answer, stream = WRAPPED[kind]
    code, _, body = await asked(CHAT, stream, writes(answer))
    sent = answer.partition(b"\r\n\r\n")[2]
    if "gzip" in kind or kind == "deflate":
        sent = gzip.decompress(sent) if "gzip" in kind else zlib.decompress(sent)  # the test's client inflates
    if stream and b"data: " in sent and "gzip" not in kind:
        sent = sent.replace(event(usage=usage(10, 2)), b"")  # which the client has not asked for
    assert (code, body) == (200, sent)
    (line,) = request_lines()
    assert "failed_attempts" not in line
    assert line["estimated"] == "tokens" if "gzip" in kind or kind == "deflate" else line["completion_tokens"] == 2


@pytest.mark.parametrize("kind", WRAPPED)
async def test_it_is_translated(kind: str, request_lines: Lines) -> None:
    answer, stream = WRAPPED[kind]
    code, content_type, body = await asked(MESSAGES, stream, chat_only(answer))
    assert code == 200
    if stream:
        assert content_type == "text/event-stream"
        assert body.count(b"event: message_stop\n") == 1
        assert b"Par" in body
    else:
        assert content_type == "application/json"
        assert json.loads(body)["content"] == [{"type": "text", "text": "Paris"}]
    assert request_lines()[0]["completion_tokens"] == 2


async def test_calls_and_reasoning_of_an_unasked_stream_are_translated() -> None:
    delta = {"reasoning_content": "hm", "tool_calls": [{**CALL, "index": 0}]}
    choice = {"index": 0, "delta": delta, "finish_reason": "tool_calls"}
    stream = b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"  # without [DONE]
    code, _, body = await asked(MESSAGES, False, chat_only(http(200, stream, "text/event-stream")))
    assert code == 200
    thinking, call = json.loads(body)["content"]
    assert thinking["thinking"] == "hm"
    assert (call["name"], call["input"]) == ("f", {"a": 1})


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_an_object_of_the_clients_own_api_passes(path: str) -> None:
    """Its client has asked for a stream: it decides what to do."""
    body = json.dumps({"id": "x", "type": "message", "object": "response", "content": [], "output": []}).encode()

    async def asked_once(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(http(200, body))

    async with FakeReplica([asked_once]) as one, FakeReplica([asked_once]) as two, running(one, two, **TURNS) as run:
        async with run.session.post(run.url + path, json={**QUESTION, "input": "hi", "stream": True}) as answer:
            assert (answer.status, await answer.read()) == (200, body)
        assert len(one.requests) + len(two.requests) == 1


def raw_deflate(data: bytes) -> bytes:
    squeezed = zlib.compressobj(wbits=-15)
    return squeezed.compress(data) + squeezed.flush()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["no header", "not compressed"])
async def test_a_compression_that_is_not_what_its_head_says_is_read(kind: str, stream: bool) -> None:
    """Some clients cannot read it: a raw deflate, and what is not compressed at all."""
    data = EVENTS if stream else json.dumps(whole()).encode()
    sent = raw_deflate(data) if kind == "no header" else data
    answer = http(200, sent, "text/event-stream" if stream else "application/json", "Content-Encoding: deflate")
    code, _, body = await asked(MESSAGES, stream, chat_only(answer))
    assert (code, b"Par" in body) == (200, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["broken", "too long", "members"])
async def test_a_compression_that_cannot_be_read_is_not_computed_again(kind: str, stream: bool) -> None:
    data = EVENTS if stream else json.dumps(whole()).encode()
    broken = gzip.compress(data)
    sent = {
        "broken": broken[:10] + b"\xff" * 40 + broken[50:],
        "too long": gzip.compress(data[:-4] + b" " * MOST + data[-4:]),
        "members": gzip.compress(b"") * (MEMBERS + 2) + broken,
    }[kind]
    answer = http(200, sent, "text/event-stream" if stream else "application/json", "Content-Encoding: gzip")
    code, _, body = await asked(MESSAGES, stream, chat_only(answer))
    assert code == 502 or (stream and b"event: error\n" in body)
    assert b"compress" in body


async def test_an_unknown_compression_is_not_computed_again() -> None:
    answer = http(200, b"x" * 50, "text/event-stream", "Content-Encoding: zstd")
    code, _, body = await asked(MESSAGES, True, chat_only(answer))
    assert (code, b"zstd" in body) == (502, True)


async def test_an_answer_too_long_to_be_translated_is_not_computed_again() -> None:
    answer = http(200, json.dumps(whole(content="x" * MAX_HELD_ANSWER)).encode())
    code, _, body = await asked(MESSAGES, False, chat_only(answer))
    assert (code, b"Ask for a stream" in body) == (502, True)


@pytest.mark.parametrize("body", [b"", b"<html>", b"null", b"[1]", b'{"half": ', b'{"error": {"message": "oom"}}'])
async def test_what_is_no_answer_goes_to_another_replica(body: bytes) -> None:
    bad, good = writes(http(200, body)), writes(http(200, json.dumps(whole()).encode()))
    async with FakeReplica([bad]) as one, FakeReplica([good]) as two, running(one, two, **TURNS) as run:
        for _ in range(2):
            assert (await run.post(QUESTION))[0] == 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'\xef\xbb\xbf{"a": [NaN, Infinity, -Infinity]}', {"a": [None, None, None]}),
        (b'{"a": "\\ud83d!"}', {"a": "?!"}),
        (b'{"a": "\xff"}', {"a": "\ufffd"}),
    ],
)
def test_json_that_clients_read_is_read(text: bytes, value: Any) -> None:
    assert read_json(text) == value


@pytest.mark.parametrize("text", [b"", b"[DONE]", b"{", b"[" * 100_000, b'{"a": %b}' % (b"1" * 5000)])
def test_what_is_no_json_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)


def test_an_answer_that_inflates_too_far_is_an_error() -> None:
    with pytest.raises(GatewayError, match="becomes more than"):
        AnswerInflater().feed(gzip.compress(b"x" * (MOST + 1)))
    with pytest.raises(GatewayError, match="broken"):
        AnswerInflater().feed(b"no gzip")


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 40), st.sampled_from(["gzip", "zlib", "raw"]))
def test_any_pieces_of_a_compressed_answer_give_the_same(texts: list[bytes], size: int, kind: str) -> None:
    texts = [b'{"text": ' + text for text in texts] if kind == "gzip" else [b'{"text": ' + b"".join(texts)]
    squeeze = {"gzip": gzip.compress, "zlib": zlib.compress, "raw": raw_deflate}[kind]
    sent, inflater = b"".join(map(squeeze, texts)), AnswerInflater()
    assert b"".join(inflater.feed(sent[at : at + size]) for at in range(0, len(sent), size)) == b"".join(texts)


def test_padding_behind_a_compressed_answer_is_dropped() -> None:
    inflater = AnswerInflater()
    assert inflater.feed(gzip.compress(b'{"a": 1}') + bytes(9)) == b'{"a": 1}'
    assert [inflater.feed(bytes(1000)) for _ in range(3)] == [b""] * 3
    assert len(inflater._stream.unused_data) < 10, "it is not kept"  # type: ignore[union-attr]


def test_the_beginning_of_a_compressed_answer_is_bounded() -> None:
    named = b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * SEARCHED  # a name without an end
    assert inflated_begin(named, "gzip", 16) == b""
    assert inflated_begin(gzip.compress(b"x" * 10**6), "gzip", 16) == b"x" * 16
    assert inflated_begin(b"text", "", 16) == b"text"
    assert all(inflated_begin(data, "gzip", 16) == b"" for data in (b"", b"\x1f", b"\xff" * 30))
