"""The names of events, and the beginning of a stream before its first token."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.dialect import Dialect, StreamOpening
from gateway.dialects.events.named import MAX_OPENING, has_name, name_of
from gateway.dialects.responses.responses import Responses
from gateway.errors import ReplicaFailure
from tests.gateway.dialects.test_openai_stream import cut


def named(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({**more, "type": kind}).encode())


QUIET = {
    "messages": named("message_start", message={"usage": {"input_tokens": 5}}) + named("ping") + b": comment\n\n",
    "responses": b"retry: 5\n\n" + named("response.created", response={}) + named("response.in_progress", response={}),
}
LOUD = {"messages": named("content_block_start", index=0), "responses": named("response.output_item.added", item={})}
FAILED = {
    "messages": named("error", error={"type": "api_error", "message": "boom"}),
    "responses": named("response.failed", response={"error": {"code": "server_error", "message": "boom"}}),
}
REFUSED = {
    "messages": named("error", error={"type": "invalid_request_error", "message": "too long"}),
    "responses": named("error", code="context_length_exceeded", message="too long"),
}
KINDS: dict[str, Dialect] = {"messages": Messages(), "responses": Responses()}


def opening(kind: str) -> StreamOpening:
    found = KINDS[kind].opening(b"")
    assert found
    return found


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


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_a_stream_begins_with_its_first_token(kind: str, places: list[int]) -> None:
    stream = opening(kind)
    for piece in cut(QUIET[kind], places):
        assert not stream.feed(piece)
        assert stream.silent
    seen = [stream.feed(piece) for piece in cut(LOUD[kind], places)]
    assert any(seen)
    assert not stream.silent


@given(st.sampled_from(sorted(KINDS)), st.booleans(), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_one_that_begins_with_a_failure_raises_it(kind: str, after_quiet: bool, places: list[int]) -> None:
    stream = opening(kind)
    if after_quiet:
        assert not stream.feed(QUIET[kind])
    with pytest.raises(ReplicaFailure, match="boom"):
        assert [stream.feed(piece) for piece in cut(FAILED[kind], places)] == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_clients_error_is_an_answer(kind: str) -> None:
    assert opening(kind).feed(REFUSED[kind])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_one_that_does_not_begin_for_long_has_begun(kind: str) -> None:
    """`response.created` repeats its request: nobody waits until memory is full."""
    stream = opening(kind)
    first = named("response.created" if kind == "responses" else "ping", text="x" * MAX_OPENING)
    assert stream.feed(first)
    endless = opening(kind)
    fed = 0
    while not endless.feed(b": still here\n\n"):
        fed += 1
        assert fed < MAX_OPENING


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
