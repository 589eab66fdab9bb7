"""Messages requests as chat requests: the same prompt, and nothing lost in silence."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic.prompt import messages_prompt
from gateway.dialects.prompt.chat import chat_prompt
from gateway.errors import GatewayError
from gateway.features.translation.messages.request import chat_request
from gateway.features.translation.messages.turns import FAILED
from tests.gateway.dialects.conversations import PNG, SYSTEMS, TEXTS, TOOLS, TURNS, Image, Turn, messages

TEXT_RESULTS = TURNS.filter(
    lambda turns: not any(isinstance(part, Image) for turn in turns for call in turn.calls for part in call.result)
)
NONCE = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"}
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def translated(**body: Any) -> dict[str, Any]:
    chat: dict[str, Any] = json.loads(chat_request(json.dumps({"model": "m", "max_tokens": 9, **body}).encode()).body)
    return chat


def turns_of(*content: Any, role: str = "user") -> list[Any]:
    found: list[Any] = translated(messages=[{"role": role, "content": [*content]}])["messages"]
    return found


@given(SYSTEMS, TOOLS, TEXT_RESULTS.filter(bool), st.booleans())
def test_the_prompt_is_the_same(system: list[str], tools: list[Any], turns: list[Turn], billed: bool) -> None:
    body = messages(system, tools, turns)
    if billed:
        body["system"] = [NONCE, *body.get("system", [])]
    raw = json.dumps(body).encode()
    chat = json.loads(chat_request(raw).body)
    assert chat_prompt(chat).joined() == messages_prompt(body).joined()


@given(TURNS.filter(bool))
def test_images_of_results_follow_in_the_users_turn(turns: list[Turn]) -> None:
    """Nothing of a conversation is lost, and a tool's message has only text."""
    chat = translated(**messages([], [], turns))
    wanted = [part for turn in turns for part in turn.said if isinstance(part, Image)]
    wanted += [part for turn in turns for call in turn.calls for part in call.result if isinstance(part, Image)]
    found = list[str]()
    for turn in chat["messages"]:
        shown = [part for part in turn["content"] or "" if isinstance(part, dict) and part["type"] == "image_url"]
        assert not shown or turn["role"] == "user"
        found += [part["image_url"]["url"].rpartition(",")[2] for part in shown]
    assert sorted(found) == sorted(image.data for image in wanted)


def test_a_result_with_an_image() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "one"}, IMAGE]},
        {"type": "tool_result", "tool_use_id": "b", "content": "two"},
    ]
    assert turns_of({"type": "text", "text": "go on"}, *results) == [
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": [IMAGE_URL, {"type": "text", "text": "go on"}]},
    ]


def test_a_failed_tool_without_a_text_has_one() -> None:
    failed = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    assert turns_of(failed)[0]["content"] == FAILED
    assert turns_of({**failed, "content": "no such file"})[0]["content"] == "no such file"
    assert turns_of({**failed, "is_error": False})[0]["content"] == ""


def test_documents() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert turns_of({"type": "document", "source": text, "title": "T", "context": "C"}) == [
        {"role": "user", "content": "T\n\nC\n\nbody"}
    ]
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    file = {"filename": "T", "file_data": "data:application/pdf;base64,AAAA"}
    assert turns_of({"type": "document", "source": pdf, "title": "T"})[0]["content"] == [
        {"type": "text", "text": "T"},
        {"type": "file", "file": file},
    ]
    inner = {"type": "content", "content": [{"type": "text", "text": "x"}, IMAGE]}
    assert turns_of({"type": "document", "source": inner})[0]["content"] == [{"type": "text", "text": "x"}, IMAGE_URL]


def test_an_image_by_its_address() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    assert turns_of(image)[0]["content"] == [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]


def test_a_turn_of_the_assistant() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"b": 1, "a": [1.5, "é"]}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    (turn,) = turns_of(thought, {"type": "redacted_thinking", "data": "x"}, use, role="assistant")
    function = {"name": "f", "arguments": '{"b":1,"a":[1.5,"é"]}'}
    assert turn == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "t", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 40}, {"temperature": 0.5, "top_p": 0.9, "top_k": 40}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop_sequences": []}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stream": False}, {}),
        ({"cache_salt": "s", "chat_template_kwargs": {"x": 1}}, {"cache_salt": "s", "chat_template_kwargs": {"x": 1}}),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "beta": 1}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "max"}}, {}),
        ({"context_management": {"edits": []}, "mcp_servers": []}, {}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {}),
        ({"temperature": None, "stop_sequences": None, "tools": None, "tool_choice": None, "output_format": None}, {}),
    ],
)
def test_fields(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    plain = {"model": "m", "messages": [USER], "max_tokens": 9}
    assert translated(messages=[USER], **body) == {**plain, **wanted}


@pytest.mark.parametrize("where", ["output_format", "output_config"])
def test_a_wanted_form_of_the_answer(where: str) -> None:
    form: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    chat = translated(messages=[USER], **{where: form if where == "output_format" else {"format": form, "effort": "low"}})
    assert chat["response_format"]["type"] == "json_schema"
    assert json.dumps(chat["response_format"]["json_schema"]["schema"]) == json.dumps(SCHEMA), "in the same order"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_a_tool(choice: dict[str, Any], wanted: Any) -> None:
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    chat = translated(messages=[USER], tools=[tool], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert chat["tool_choice"] == wanted
    assert chat["parallel_tool_calls"] is False
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]


def test_turns_of_the_system_lose_their_billing_line() -> None:
    line = NONCE["text"]
    assert translated(messages=[USER], system=line)["messages"] == [USER]
    assert translated(messages=[USER], system=f"{line}\nBe kind.")["messages"][0] == {"role": "system", "content": "Be kind."}
    assert turns_of(NONCE, {"type": "text", "text": "x"}, role="system") == [{"role": "system", "content": "x"}]


RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("role", "block", "param"),
    [
        ("user", "x", ""),
        ("user", {"text": "x"}, ""),
        ("user", {"type": "text"}, ".text"),
        ("user", {"type": "image"}, ".source"),
        ("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source.type"),
        ("user", {"type": "image", "source": {"type": "base64", "data": "x"}}, ".source.media_type"),
        ("user", {"type": "document", "source": {"type": "url", "url": "u"}}, ".source.type"),
        (
            "user",
            {"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}},
            ".source.content[0].type",
        ),
        ("user", {**RESULT, "tool_use_id": None}, ".tool_use_id"),
        ("user", {**RESULT, "content": 5}, ".content"),
        ("assistant", {**USE, "input": "{}"}, ".input"),
        ("assistant", {**USE, "name": None}, ".name"),
        ("assistant", {"type": "thinking", "thinking": None}, ".thinking"),
    ],
)
def test_a_block_without_words_in_chat_is_named(role: str, block: Any, param: str) -> None:
    with pytest.raises(GatewayError) as raised:
        turns_of({"type": "text", "text": "x"}, block, role=role)
    error = raised.value
    assert (error.status, error.param) == (400, f"messages[0].content[1]{param}")
    assert error.message.startswith(str(error.param))
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": None, "input_schema": {}}]}, "tools[0].name"),
        ({"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}, "mcp_servers"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences"),
        ({"output_format": {"type": "text"}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_a_field_without_words_in_chat_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as raised:
        translated(**{"messages": [USER], **body})
    assert (raised.value.status, raised.value.param) == (400, param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)
)
NAMES = ["type", "text", "source", "content", "input", "id", "name", "tool_use_id", "thinking", "data", "url", "media_type"]
KINDS = ["text", "image", "document", "tool_result", "tool_use", "thinking", "base64", "url", "content"]
BLOCKS = st.recursive(
    st.sampled_from(KINDS) | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=12,
)


@given(st.sampled_from(["user", "assistant", "system"]), BLOCKS, BLOCKS, BLOCKS)
def test_whatever_a_client_sends_is_translated_or_a_400(role: str, content: Any, system: Any, tools: Any) -> None:
    body = {"model": "m", "messages": [{"role": role, "content": content}], "system": system, "tools": tools}
    with contextlib.suppress(GatewayError):  # which is a 400, as all that `bad_request` makes
        assert json.loads(chat_request(json.dumps(body).encode()).body)["model"] == "m"


def test_what_is_nested_too_deeply_is_a_400() -> None:
    deep = b"[" * 300 + b"]" * 300
    use = b'[{"type": "tool_use", "id": "t", "name": "f", "input": {"x": ' + deep + b"}}]"
    with pytest.raises(GatewayError, match="nested too deeply"):
        chat_request(b'{"model": "m", "messages": [{"role": "assistant", "content": ' + use + b"}]}")
