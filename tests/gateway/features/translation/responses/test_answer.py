"""Whole chat completions as responses, and errors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from openai.types.responses import Response

from gateway.dialects.openai.usage import parse_usage as chat_usage
from gateway.dialects.responses.usage import parse_usage
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from tests.gateway.dialects.conversations import VALUES
from tests.gateway.features.translation.responses.streams import ECHO, TRANSLATION, USAGE
from tests.support.paths import CAPTURES


def completion(message: Any, reason: Any = "stop", **more: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return json.dumps({"id": "chatcmpl-1", "created": 17, "choices": [choice], "usage": USAGE, **more}).encode()


def answered(message: Any, reason: Any = "stop", **more: Any) -> Response:
    return Response.model_validate_json(TRANSLATION.answer(completion(message, reason, **more), ECHO))


def function(name: Any, arguments: Any, call_id: Any = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_all_of_an_answer() -> None:
    calls = [function("f", '{"a": 1}'), function("patch", '{"input": "p"}', None), function("mcp__cal__add", {"a": 1})]
    message = {"role": "assistant", "content": "x", "refusal": "no", "reasoning_content": "hm", "tool_calls": calls}
    response = answered(message, "tool_calls")
    assert (response.status, response.object, response.created_at, response.error) == ("completed", "response", 17, None)
    assert response.id.startswith("resp_")
    assert (response.model, response.instructions, response.tool_choice, response.metadata) == ("m", "s", "auto", {"a": "b"})
    assert len(response.tools) == 4
    thought, said, first, patch, add = (item.to_dict() for item in response.output)
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [part["type"] for part in said["content"]] == ["output_text", "refusal"]  # type: ignore[index, attr-defined]
    assert str(first["id"]).startswith("fc_")
    assert (first["call_id"], first["name"], first["arguments"], first["status"]) == ("c", "f", '{"a": 1}', "completed")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "p")
    assert (add["name"], add["namespace"], add["arguments"]) == ("add", "mcp__cal__", '{"a":1}')
    usage = response.usage
    assert usage
    assert usage.to_dict() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 4},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 25,
    }


def test_an_answer_that_was_cut_is_incomplete() -> None:
    response = answered({"content": "x", "reasoning": "y"}, "length")
    assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert [item.to_dict()["status"] for item in response.output] == ["completed", "incomplete"]
    assert answered({"content": None}, None).output == []


def test_the_same_answer_has_the_same_ids_and_another_has_others() -> None:
    body = completion({"content": "x"})
    assert TRANSLATION.answer(body, ECHO) == TRANSLATION.answer(body, ECHO)
    assert answered({"content": "x"}).id != answered({"content": "x"}, id="chatcmpl-2").id


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": 5}]}',
        b'{"choices": [{"message": {"content": "half"}, "finish_reason": "error"}]}',
        b'{"choices": [' + b"{}," * 200_000 + b"{}]}",
        completion({"tool_calls": [function(None, "{}")]}),
        completion({"tool_calls": [function("f" * 2000, "{}")]}),
    ],
)
def test_what_is_no_answer_is_garbage(body: bytes) -> None:
    with pytest.raises(ReplicaFailure) as caught:
        TRANSLATION.answer(body, ECHO)
    assert caught.value.reason == "garbage"


@given(VALUES, VALUES, VALUES, VALUES)
def test_values_of_any_type_are_survived(content: Any, thought: Any, arguments: Any, usage: Any) -> None:
    message = {"content": content, "reasoning": thought, "tool_calls": [arguments, function("f", arguments, content)]}
    # A call without a name fails the answer if it has arguments; one without any is dropped.
    given = arguments.get("function") if isinstance(arguments, dict) else None
    called = isinstance(given, dict) and given.get("arguments")
    with contextlib.suppress(ReplicaFailure) if called else contextlib.nullcontext():
        answered(message, thought, usage=usage, created=content, id=usage)


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize("file", ["vllm/chat_1_cold.json", "vllm/chat_2_same.json", "llamacpp/chat_2_same.json"])
def test_recorded_answers(file: str) -> None:
    recorded = json.loads(Path(CAPTURES, file).read_text("utf-8"))
    chat = recorded.get("answer") or recorded.get("response")
    out = TRANSLATION.answer(json.dumps(chat).encode(), ECHO)
    response, usage = Response.model_validate_json(out), chat_usage(chat)
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert usage
    found = Usage(usage.prompt, usage.completion, usage.cached or 0, usage.written)
    assert parse_usage(json.loads(out)) == found


def test_errors_have_the_shape_of_openai() -> None:
    own = b'{"error": {"message": "too long", "type": "invalid_request_error", "param": null, "code": null}}'
    assert TRANSLATION.error(400, own) == own
    old = json.loads(TRANSLATION.error(400, b'{"object": "error", "message": "too long", "code": 400}'))["error"]
    assert (old["message"], old["type"]) == ("too long", "invalid_request_error")
    for body in (b"", b"<html>", b"[]", b'{"error": "boom"}', b'{"error": {"message": 5}}', b"\xff"):
        error = json.loads(TRANSLATION.error(502, body))["error"]
        assert error["type"] == "server_error"
        assert error["message"]
