"""Responses requests in the words of chat."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_structure import MAX_STRUCTURE
from gateway.dialects.prompt.chat import chat_prompt
from gateway.dialects.responses.prompt import responses_prompt
from gateway.dialects.responses.responses import Responses
from gateway.errors import GatewayError
from gateway.features.translation.responses.translation import ResponsesTranslation
from tests.clients.recordings import load
from tests.gateway.dialects import conversations
from tests.gateway.dialects.conversations import SYSTEMS, TOOLS, TURNS, VALUES, Turn

TRANSLATION = ResponsesTranslation()
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "mcp__cal__", "description": "A calendar.", "tools": [{**FUNCTION, "name": "add"}]}


def chat(**body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TRANSLATION.request(orjson.dumps({"model": "m", "input": "x", **body})).body)
    return found


def echo(**body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TRANSLATION.request(orjson.dumps({"model": "m", "input": "x", **body})).echo)
    return found


def messages(*items: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(input=[*items])["messages"]
    return found


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [*parts]}


def refused(**body: Any) -> str:
    with pytest.raises(GatewayError) as caught:
        chat(**body)
    assert caught.value.status == 400
    return caught.value.param or ""


@given(SYSTEMS, TOOLS, TURNS, st.sampled_from(["low", None]))
def test_a_translated_request_has_the_same_canonical_prompt(
    system: list[str], tools: list[Any], turns: list[Turn], effort: str | None
) -> None:
    body = conversations.responses(system, list({tool["name"]: tool for tool in tools}.values()), turns)
    if effort:
        body["reasoning"] = {"effort": effort, "summary": "auto"}
    translated = json.loads(TRANSLATION.request(json.dumps(body).encode()).body)
    if not system and not turns:
        assert translated["messages"] == [{"role": "user", "content": ""}]  # engines refuse a conversation without a turn
        return
    assert chat_prompt(translated).joined() == responses_prompt(body).joined()


ITEMS = st.lists(
    st.sampled_from(
        [
            said({"type": "input_text", "text": "a"}),
            said({"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}, role="developer"),
            said({"type": "output_text", "text": "b"}, role="assistant"),
            said({"type": "refusal", "refusal": "no"}, role="assistant"),
            {"role": "assistant", "content": None},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "opaque"},
            CALL,
            {"type": "function_call_output", "call_id": "c", "output": {"a": [1]}},
            {"type": "function_call_output", "call_id": "c", "output": None},
        ]
    ),
    min_size=1,
    max_size=8,
)


@given(ITEMS)
def test_items_in_any_order_have_the_same_canonical_prompt(items: list[Any]) -> None:
    translated = {"model": "m", "messages": messages(*items)}
    assert chat_prompt(translated).joined() == responses_prompt({"input": items}).joined()


def test_an_output_of_objects_that_are_no_parts_is_a_text() -> None:
    output = [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    (call, told) = messages(
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": output},
    )
    assert call["tool_calls"][0]["function"]["name"] == "shell"
    assert (told["role"], told["tool_call_id"], json.loads(told["content"])) == ("tool", "c", output)


def test_one_answer_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    text = said({"type": "output_text", "text": "a", "annotations": []}, role="assistant")
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    assert messages(said({"type": "input_text", "text": "x"}), thought, text, CALL, CALL, output) == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 2,
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    assert [message["role"] for message in messages(text, text)] == ["assistant", "assistant"]


def test_images_and_files() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    file = {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}
    assert messages(said(image, file))[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}},
    ]


def test_the_other_fields() -> None:
    found = chat(
        instructions="s",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stream=True,
        parallel_tool_calls=False,
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        user="u",
        metadata={"a": "b"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"a": "b"},
    )
    assert found == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": False,
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "high",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
        "user": "u",
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert chat(text={"format": {"type": "text"}}, tools=[], tool_choice="auto", parallel_tool_calls=True).keys() == {
        "model",
        "messages",
    }


def test_custom_tools_and_namespaces_are_functions() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools = [{**CUSTOM, "format": grammar}, SPACE]
    patch, add = (tool["function"] for tool in chat(tools=tools)["tools"])
    assert patch["name"] == "patch"
    assert "lark" in patch["description"]
    assert "start: /.+/" in patch["description"]
    assert patch["parameters"]["required"] == ["input"]
    assert add["name"] == "mcp__cal__add"
    assert add["description"] == "A calendar.\n\nd"
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    answer, result = messages(call, {**CALL, "name": "add", "namespace": "mcp__cal__"}, output)
    assert [one["function"]["name"] for one in answer["tool_calls"]] == ["patch", "mcp__cal__add"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"input": 'a "b"'}
    assert result == {"role": "tool", "tool_call_id": "c", "content": "done"}
    assert echo(tools=tools)["tools"][1] == SPACE


def test_allowed_tools_leave_out_the_others() -> None:
    tools = [FUNCTION, {**FUNCTION, "name": "g"}, CUSTOM]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    found = chat(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in found["tools"]] == ["g"]
    assert found["tool_choice"] == "required"
    assert len(echo(tools=tools, tool_choice=choice)["tools"]) == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"instructions": 5}, "instructions"),
        ({"input": None}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
        ({"input": [{"type": []}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [said({"type": "input_text"})]}, "input[0].content[0].text"),
        ({"input": [said({"type": []})]}, "input[0].content[0].type"),
        ({"input": [said({"type": "input_image", "file_id": "f"})]}, "input[0].content[0].file_id"),
        ({"input": [said({"type": "input_file", "file_url": "f"})]}, "input[0].content[0].file_url"),
        ({"input": [{**CALL, "arguments": 5}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [FUNCTION, {"type": "local_shell"}]}, "tools[1].type"),
        ({"tools": [{"type": []}]}, "tools[0].type"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**SPACE, "tools": [SPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": []}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice.tools[0]"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": []}}, "text.format.type"),
        ({"reasoning": "high"}, "reasoning"),
    ],
)
def test_what_chat_cannot_say_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    assert refused(**body) == field


@given(st.dictionaries(st.sampled_from(["input", "tools", "tool_choice", "text", "reasoning", "include", "metadata"]), VALUES))
def test_any_value_is_translated_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(GatewayError):
        assert chat(**body)["messages"]


@pytest.mark.parametrize("body", [{"input": [{"type": []}]}, {"input": "x", "tools": [{"type": []}]}])
def test_a_type_that_is_no_text_is_no_error_of_the_gateway(body: dict[str, Any]) -> None:
    assert Responses().parse(json.dumps({"model": "m", **body}).encode()).model == "m"


def test_large_lists_are_read_once() -> None:
    many = MAX_STRUCTURE // 4
    assert len(messages(*[{"role": "user", "content": "x"}] * many)) == many
    assert len(messages(*[CALL] * many)[0]["tool_calls"]) == many
    tools = [{"type": "function", "name": f"f{number}"} for number in range(many)]
    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": tool["name"]} for tool in tools]}
    assert len(chat(tools=tools, tool_choice=allowed)["tools"]) == many


def test_what_codex_sends() -> None:
    """Recorded. It offers a search that OpenAI's server would run: the model is not told of it."""
    for row in load("codex-responses"):
        body = row["body"]
        assert [tool for tool in body["tools"] if tool["type"] == "web_search"]
        found = chat(**body)
        names = [tool["function"]["name"] for tool in found["tools"]]
        assert "exec_command" in names
        assert sum(name.startswith("multi_agent_v1__") for name in names) == 5, "tools in a namespace"
        assert [turn["role"] for turn in found["messages"][:4]] == ["system", "system", "user", "user"]
        calls = [item for item in body["input"] if item["type"] == "function_call"]
        assert sum(len(turn.get("tool_calls", ())) for turn in found["messages"]) == len(calls)
        turns = chat_prompt({**found, "tools": []}).joined()
        assert turns == responses_prompt({**body, "tools": []}).joined()
