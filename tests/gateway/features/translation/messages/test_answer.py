"""Chat completions as Messages answers, valid by the official client's types; and errors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.usage import parse_usage
from gateway.dialects.openai import usage as openai
from gateway.dialects.openai.chat_answer import MAX_CALLS, MAX_NAME
from gateway.errors import ReplicaFailure
from gateway.features.translation.messages.echo import Echo
from gateway.features.translation.messages.translation import MessagesTranslation
from tests.gateway.dialects.conversations import TEXTS
from tests.support.paths import CAPTURES


def answered(message: Any, reason: Any = "stop", echo: bytes = b"", usage: Any = None, **choice: Any) -> dict[str, Any]:
    choices = [{"index": 0, "message": message, "finish_reason": reason, **choice}]
    body = {"id": "chatcmpl-1f", "object": "chat.completion", "model": "m", "choices": choices, "usage": usage}
    return read(json.dumps(body).encode(), echo)


def read(body: bytes, echo: bytes = b"") -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(MessagesTranslation().answer(body, echo))
    Message.model_validate(answer, strict=True)
    return answer


def call(name: Any = "f", arguments: Any = "{}", id_: Any = "c") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_all_kinds_of_blocks() -> None:
    message = {"role": "assistant", "content": "hi", "reasoning": "hm", "tool_calls": [call(arguments='{"b": 1, "a": 1.50}')]}
    answer = MessagesTranslation().answer(
        json.dumps(
            {"id": "chatcmpl-1f", "model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
        ).encode(),
        b"",
    )
    assert b'"input":{"b": 1, "a": 1.50}' in answer, "arguments stand as the model wrote them"
    found = json.loads(answer)
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
    assert (found["id"], found["model"], found["stop_reason"]) == ("msg_1f", "m", "tool_use")


@pytest.mark.parametrize(
    ("reason", "more", "wanted"),
    [
        ("stop", {}, ("end_turn", None)),
        (None, {}, ("end_turn", None)),
        (5, {}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"matched_stop": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": "eos"}, ("end_turn", None)),  # not the client's
        ("stop", {"stop_reason": 151643}, ("end_turn", None)),
        ("length", {"stop_reason": "END"}, ("max_tokens", None)),
    ],
)
def test_why_it_ends(reason: Any, more: dict[str, Any], wanted: tuple[str, str | None]) -> None:
    answer = answered({"content": "x"}, reason, Echo(["END"], empty=False).written(), **more)
    assert (answer["stop_reason"], answer["stop_sequence"]) == wanted


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "function_call", None])
def test_an_answer_with_calls_ends_with_them(reason: str | None) -> None:
    """A named tool's call ends with "stop" in OpenAI's API."""
    assert answered({"tool_calls": [call()]}, reason)["stop_reason"] == "tool_use"
    assert answered({"content": "x"}, reason)["stop_reason"] == "end_turn"
    assert answered({"tool_calls": [call(arguments='{"a": ')]}, "length")["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", {}),
        (" \n", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": "[1]"}),
        ("[" + "{}," * 70_000 + "1]", {"arguments": "[" + "{}," * 70_000 + "1]"}),
    ],
)
def test_arguments_are_an_object(arguments: Any, wanted: Any) -> None:
    assert answered({"tool_calls": [call(arguments=arguments)]})["content"][0]["input"] == wanted


def test_ids_and_names() -> None:
    calls = [call(id_=None), call(id_="x" * (MAX_NAME + 1)), call(name="", arguments=""), call(id_="functions.f:0"), "x", {}]
    for nameless in (call(name=""), call(name=None)):
        with pytest.raises(ReplicaFailure, match="without a name"):
            answered({"tool_calls": [nameless]})
    content = answered({"tool_calls": calls})["content"]
    assert [block["id"] for block in content] == ["toolu_1f_0", "toolu_1f_1", "functions.f:0"]
    for id_ in ("x y", "z" * 100_000, None, 5):
        found = read(json.dumps({"id": id_, "choices": [{"message": {"content": "x"}}]}).encode())["id"]
        assert found.startswith("msg_")
        assert len(found) < 70


def test_an_id_is_that_of_one_call() -> None:
    content = answered({"tool_calls": [call(id_="c"), call(id_="c")]})["content"]
    assert [block["id"] for block in content] == ["c", "toolu_1f_1"]


def test_a_refusal_is_a_text() -> None:
    assert answered({"content": None, "refusal": "No."})["content"] == [{"type": "text", "text": "No."}]


def test_nothing_was_to_be_generated() -> None:
    """`max_tokens: 0` fills a cache."""
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    answer = answered({"content": "x", "tool_calls": [call()]}, "length", Echo([], empty=True).written(), usage)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert answer["usage"]["input_tokens"] == 9


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 10**6))
def test_counts_are_read_as_they_were(prompt: int, completion: int, cached: int | None, written: int | None) -> None:
    details = {"cached_tokens": cached, "cache_write_tokens": written}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    found, wanted = parse_usage(answered({"content": "x"}, usage=usage)), openai.parse_usage({"usage": usage})
    assert found
    assert wanted
    assert (found.prompt, found.completion, found.written) == (wanted.prompt, wanted.completion, wanted.written)
    assert found.cached == wanted.cached or (wanted.cached is None and wanted.written)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "id",
                    "model",
                    "choices",
                    "message",
                    "content",
                    "reasoning",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "usage",
                ]
            ),
            inner,
        )
    ),
    max_leaves=20,
)


@given(ANYTHING, ANYTHING)
def test_whatever_a_replica_sends_is_an_answer_or_its_failure(body: Any, message: Any) -> None:
    for sent in (body, {"choices": [{"message": message}]}, {"choices": [{"message": {"tool_calls": message}}]}):
        with contextlib.suppress(ReplicaFailure):
            read(json.dumps(sent).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": "x"}]}',
        b'{"choices": [{"message": {"content": "half"}, "finish_reason": "abort"}]}',
        b'{"x": [' + b"{}," * 100_000 + b"1]}",
        json.dumps({"choices": [{"message": {"tool_calls": [call()] * (MAX_CALLS + 1)}}]}).encode(),
        json.dumps({"choices": [{"message": {"tool_calls": [call("x" * (MAX_NAME + 1))]}}]}).encode(),
    ],
)
def test_what_is_no_answer_is_the_replicas_failure(body: bytes) -> None:
    with pytest.raises(ReplicaFailure) as raised:
        MessagesTranslation().answer(body, b"")
    assert raised.value.reason == "garbage"


@pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")
@pytest.mark.parametrize("file", ["vllm/chat_2_same.json", "llamacpp/chat_2_same.json"])
def test_recorded_answers(file: str) -> None:
    recorded = json.loads(Path(CAPTURES, file).read_text("utf-8"))["response"]
    answer = read(json.dumps(recorded).encode())
    assert answer["content"] == [{"type": "text", "text": recorded["choices"][0]["message"]["content"]}]
    assert parse_usage(answer) == openai.parse_usage(recorded)
    assert answer["usage"]["cache_read_input_tokens"] > 0


# -- errors


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            400,
            b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}',
            "invalid_request_error",
            "too long",
        ),
        (422, b'{"detail": "no field"}', "invalid_request_error", "no field"),
        (404, b'{"object": "error", "message": "no model"}', "not_found_error", "no model"),
        (429, b"slow down", "rate_limit_error", "slow down"),
        (500, b'{"error": "boom"}', "api_error", "boom"),
        (503, b'{"error": {"message": "Loading model"}}', "overloaded_error", "Loading model"),
        (502, b"", "api_error", "The replica answered with status 502."),
        (400, b'{"error": {"message": "cut of', "invalid_request_error", '{"error": {"message": "cut of'),
        (400, b"\xff" * 100_000, "invalid_request_error", "\ufffd" * 4096),
    ],
)
def test_errors_have_anthropics_shape(status: int, body: bytes, kind: str, message: str) -> None:
    error = json.loads(MessagesTranslation().error(status, body))
    assert error == {"type": "error", "error": {"type": kind, "message": message}}
