"""Whole answers as streams: what reads them as a stream finds what it finds in the body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.openai.generations import ChatBody, Completion
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.responses.responses import Responses

CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
SAYS = {
    "role": "assistant",
    "content": "hello\n\nyou",
    "reasoning_content": "so",
    "tool_calls": [CALL, CALL | {"id": "call_2"}],
}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
CHAT: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
CHAT |= {"choices": [{"index": 0, "message": SAYS, "finish_reason": "tool_calls"}]}
TEXT = {**CHAT, "object": "text_completion", "choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "so", "signature": "abc"},
        {"type": "text", "text": "hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "."}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 9, "output_tokens": 4},
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "m",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}", "status": "completed"},
    ],
    "usage": {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13},
}
ANSWERS = [(ChatBody(), CHAT), (Completion(), TEXT), (Messages(), MESSAGE), (Responses(), RESPONSE)]


def request(*, strip_usage: bool = False) -> ApiRequest:
    api = ApiRequest("m", b"", "", stream=True, metered=True, body=b"")
    api.strip_usage = strip_usage
    return api


@pytest.mark.parametrize(("dialect", "answer"), ANSWERS, ids=lambda value: getattr(value, "name", ""))
def test_the_stream_has_what_the_body_has(dialect: Dialect, answer: dict[str, Any]) -> None:
    body = json.dumps(answer, indent=1).encode()
    stream = dialect.streamed(request(), body)
    whole, pieces, reader = dialect.assembler(), dialect.assembler(), dialect.reader(request(), watchful=False)
    assert whole is not None
    assert pieces is not None
    whole.read(body)
    pieces.feed(stream)
    pieces.finish()
    expected, found = whole.answer(), pieces.answer()
    assert expected is not None
    assert found is not None
    assert [(part.kind, part.text) for part in found.parts] == [(part.kind, part.text) for part in expected.parts]
    assert found.finish_reason == expected.finish_reason
    assert reader.feed(stream) + reader.finish() == stream
    assert (reader.done, reader.started) == (True, True)
    assert reader.usage == dialect.usage_of(body)


def test_usage_that_the_client_has_not_asked_for_is_left_out() -> None:
    assert b"usage" not in ChatBody().streamed(request(strip_usage=True), json.dumps(CHAT).encode())


@pytest.mark.parametrize(
    "dialect", [ChatBody(), Completion(), Messages(), Responses(), PassThrough()], ids=lambda each: each.name
)
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'"text"', b"{", b'{"choices": [1]}', b'{"content": "a"}'])
def test_a_body_of_another_shape_has_no_form_as_a_stream(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (orjson's and ours)
        dialect.streamed(request(), body)


def test_the_status_of_a_response_is_its_last_event() -> None:
    for status, last in (("incomplete", "incomplete"), ("failed", "failed"), ("queued", "completed"), ([], "completed")):
        stream = Responses().streamed(request(), json.dumps({**RESPONSE, "status": status}).encode())
        assert stream.rpartition(b"event: ")[2].startswith(f"response.{last}\n".encode())
