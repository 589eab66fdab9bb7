"""The names of events, the first event of a stream, and its first token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect, StreamReader
from gateway.dialects.events.first_event import MAX_FIRST
from gateway.dialects.events.named import has_name, name_of
from gateway.dialects.events.sse import events_of
from gateway.dialects.responses.responses import Responses
from gateway.errors import ReplicaFailure
from tests.gateway.dialects.test_openai_stream import cut


def named(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({**more, "type": kind}).encode())


QUIET = {
    "messages": named("message_start", message={"usage": {"input_tokens": 5}}) + named("ping") + b": comment\n\n",
    "responses": b"retry: 5\n\n" + named("response.created", response={}) + named("response.in_progress", response={}),
}
EMPTY = {
    "messages": named("content_block_start", content_block={"type": "text", "text": ""}, index=0),
    "responses": named("response.output_item.added", item={"type": "message", "content": []})
    + named("response.content_part.added", part={"type": "output_text", "text": ""}),
}
TOKENS = [
    ("messages", named("content_block_delta", delta={"type": "text_delta", "text": "a"}, index=0)),
    ("messages", named("content_block_delta", delta={"type": "thinking_delta", "thinking": "a"}, index=0)),
    (
        "messages",
        named("content_block_start", content_block={"type": "tool_use", "id": "t", "name": "f", "input": {}}, index=0),
    ),
    ("responses", named("response.output_text.delta", delta="a")),
    ("responses", named("response.reasoning_text.delta", delta="a")),
    ("responses", named("response.output_item.added", item={"type": "function_call", "name": "f"})),
]
FAILED = {
    "messages": named("error", error={"type": "api_error", "message": "boom"}),
    "responses": named("response.failed", response={"error": {"code": "server_error", "message": "boom"}}),
}
REFUSED = {
    "messages": named("error", error={"type": "invalid_request_error", "message": "too long"}),
    "responses": named("error", code="context_length_exceeded", message="too long"),
}
KINDS: dict[str, Dialect] = {"messages": Messages(), "responses": Responses()}


def begins(kind: str, pieces: list[bytes]) -> bool:
    """Whether the stream has begun by the end of the last piece."""
    first = KINDS[kind].first_event(pieces[0])
    return first is None or any(map(first.feed, pieces))


def reader(kind: str) -> StreamReader:
    return KINDS[kind].reader(ApiRequest("m", b"", "", stream=True, metered=True, body=b""), watchful=False)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (b"event: ping\ndata: {}\n\n", "ping"),
        (b"event: ping\rdata: {}\n\n", "ping"),
        (b"event: ping\r\ndata: {}\r\n\r\n", "ping"),
        (b"event:ping\ndata: {}\n\n", "ping"),
        (b"event:  ping\ndata: {}\n\n", " ping"),
        (b"id: 5\nevent: ping\ndata: {}\n\n", "ping"),
        (b"\r\n\nevent: ping\ndata: {}\n\n", "ping"),
        (b"event: \ndata: {}\n\n", ""),
        (b"event: " + b"x" * 300 + b"\n\n", ""),
    ],
)
def test_the_name_of_an_event_is_in_its_first_bytes(event: bytes, name: str) -> None:
    assert name_of(event) == name
    assert has_name(event) == (len(event) < 300)


@given(st.sampled_from(TOKENS), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_a_stream_starts_with_its_first_token(token: tuple[str, bytes], places: list[int]) -> None:
    """What comes before passes, and is no token."""
    kind, event = token
    stream = reader(kind)
    before = QUIET[kind] + EMPTY[kind]
    assert b"".join([stream.feed(piece) for piece in cut(before, places)]) == before
    assert (stream.opened, stream.started, stream.passed) == (True, False, 0)
    assert b"".join([stream.feed(piece) for piece in cut(event, places)]) == event
    assert stream.started


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_one_that_begins_with_a_failure_raises_it(kind: str, places: list[int]) -> None:
    with pytest.raises(ReplicaFailure, match="boom"):
        begins(kind, cut(FAILED[kind], places))


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_a_failure_before_the_first_token_does_not_pass(kind: str, places: list[int]) -> None:
    stream = reader(kind)
    assert b"".join([stream.feed(piece) for piece in cut(QUIET[kind] + FAILED[kind], places)]) == QUIET[kind]
    with pytest.raises(ReplicaFailure, match="boom"):
        stream.raise_failure()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_failure_after_the_first_token_is_the_clients(kind: str) -> None:
    stream, token = reader(kind), next(event for name, event in TOKENS if name == kind)
    assert stream.feed(token + FAILED[kind]) == token + FAILED[kind]
    stream.raise_failure()
    assert stream.reported


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_clients_error_is_an_answer(kind: str) -> None:
    assert begins(kind, [REFUSED[kind]])
    stream = reader(kind)
    assert stream.feed(QUIET[kind] + REFUSED[kind]) == QUIET[kind] + REFUSED[kind]
    assert stream.done


@pytest.mark.parametrize(
    "begin", [b": ping\n", b"\n", b"retry: 5\n", *(value.partition(b"\n")[0] + b"\n" for value in QUIET.values())]
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_sign_of_life_is_not_waited_for(kind: str, begin: bytes) -> None:
    assert KINDS[kind].first_event(begin) is None


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_event_without_a_name_is_no_failure(kind: str) -> None:
    """Nobody waits until memory is full."""
    assert begins(kind, [b"data: " + b"x" * MAX_FIRST])


def test_what_a_second_stream_repeats_is_known() -> None:
    repeated = [
        name_of(event) for kind in KINDS for event in events_of(QUIET[kind] + EMPTY[kind]) if KINDS[kind].is_opening(event)
    ]
    assert repeated == ["message_start", "response.created", "response.in_progress"]
    assert not any(KINDS[kind].is_opening(event) for kind, event in TOKENS)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (named("ping"), "ping"),
        (b"event:ping\ndata: {}\n\n", "ping"),
        (b'id: 5\nevent: ping\ndata: {"type": "x"}\n\n', "ping"),
        (b"event: ping\r\ndata: {}\r\n\r\n", "ping"),
        (b'data: {"type": "ping"}\n\n', "ping"),
        (b'data: {"type": 5}\n\n', ""),
        (b"data: {}\n\n", ""),
        (b"data: event: ping\n\n", ""),
        (b": comment\nevent: ping\ndata: {}\n\n", "ping"),
        (b"", ""),
    ],
)
def test_the_name_of_an_event(event: bytes, name: str) -> None:
    assert name_of(event) == name
