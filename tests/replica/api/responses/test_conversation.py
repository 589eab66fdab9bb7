"""Items of Responses as chat messages, and each mistake."""

from typing import Any

import orjson
import pytest

from replica.api.generation import GenerationRequest
from replica.api.responses.requests import parse_count, parse_responses
from replica.api.validation import ApiError
from replica.engine import Grammar

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TOOL = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True}


def call(**fields: Any) -> GenerationRequest:
    return parse_responses(orjson.dumps({"input": "Hi"} | fields), "m")


def messages(items: Any, **fields: Any) -> Any:
    return call(input=items, **fields).prompts[0].messages


def called(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_a_text_and_instructions() -> None:
    user = {"role": "user", "content": "Hi"}
    assert messages("Hi") == [user]
    assert messages("Hi", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, user]


def test_messages_in_all_their_forms() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    items = [
        {"role": "developer", "content": "One."},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": said},
    ]
    assert [(one["role"], one["content"]) for one in messages(items)] == [
        ("system", "One."),
        ("user", "ab"),
        ("assistant", "cd"),
    ]


def test_calls_join_the_answer_that_they_belong_to() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "So."},
        CALL,
        {**CALL, "call_id": "c2", "arguments": "no JSON"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "f", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "three"},
    ]
    assert messages(items) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "So.",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [called(1, {"a": 1}), called(2, "no JSON")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [called(3, {"input": "x"})]},
        {"role": "tool", "tool_call_id": "c3", "content": "three"},
    ]


def test_tools_are_those_of_a_chat_and_others_are_named() -> None:
    request = call(tools=[TOOL, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}], reasoning={"effort": "low"})
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    assert request.prompts[0].tools == [{"type": "function", "function": function}]
    assert request.ignored == ("reasoning", "tools.custom", "tools.web_search")


def test_what_is_not_honoured_is_named() -> None:
    asked = call(
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        text={"verbosity": "low"},
        tools=[TOOL],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    )
    assert asked.ignored == ("include", "parallel_tool_calls", "text.verbosity", "tool_choice.tools")
    form = {"format": {"type": "text"}, "verbosity": "medium"}
    assert call(parallel_tool_calls=True, include=[], text=form, store=True, service_tier="auto").ignored == ()


def test_errors_will_name_the_fields_that_were_sent() -> None:
    asked = call()
    assert (asked.prompts[0].param, asked.limit_field, asked.format_field) == ("input", "max_output_tokens", "text.format")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "f"}, {"type": "allowed_tools", "mode": "required"}]
)
def test_a_forced_call_is_a_constraint(choice: Any) -> None:
    grammar = call(tools=[TOOL], tool_choice=choice).sampling.grammar
    assert grammar == Grammar("calls", '[{"name":"f","parameters":{"type":"object"}}]')


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json", '{"type":"object"}')),
        ({"type": "json_schema", "name": "x", "schema": {"type": "array"}}, Grammar("json", '{"type":"array"}')),
    ],
)
def test_the_format_of_a_text(form: Any, grammar: Grammar | None) -> None:
    assert call(text={"format": form, "verbosity": "low"}).sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "a string or a list of items, not empty"),
        ({"input": ""}, "input", "not empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": 5}, "input", "not a number"),
        ({"input": [5]}, "input[0]", "must be an object"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of user, assistant, system, developer"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "a string or a list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "reads text only"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "not 'computer_call'"),
        ({"input": [{"type": 5}]}, "input[0].type", "not (not a short string)"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name", "must be a string"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "must be a string"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least one message"),
        ({"instructions": 5}, "instructions", "must be a string"),
        ({"tools": [5]}, "tools[0]", "an object with a type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing or has the wrong type"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "missing or has the wrong type"),
        ({"tool_choice": "any"}, "tool_choice", "'auto', 'none', 'required' or"),
        ({"tool_choice": "required"}, "tool_choice", "together with tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "not among the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "must be 'auto'"),
        ({"truncation": "always"}, "truncation", "'auto'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'text', 'json_object' or 'json_schema'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "a JSON schema"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        (
            {"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "text.format",
            "cannot be combined",
        ),
    ],
)
def test_mistakes(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Response with id 'resp_1' not found"),
        ({"conversation": "conv_1"}, "conversation", "was not found"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "was not found"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "Item with id 'msg_1' not found"),
        ({"model": "x"}, "model", "'x' does not exist"),
    ],
)
def test_what_is_stored_elsewhere_is_not_found(fields: dict[str, Any], param: str, message: str) -> None:
    for parse in (parse_responses, parse_count):
        with pytest.raises(ApiError, match=message) as caught:
            parse(orjson.dumps({"input": "Hi"} | fields), "m")
        assert (caught.value.status, caught.value.param) == (404, param)
