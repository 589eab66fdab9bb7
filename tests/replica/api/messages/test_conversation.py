"""Anthropic's blocks as chat messages, where breakpoints are, and each mistake."""

from typing import Any

import orjson
import pytest

from replica.api.generation import GenerationRequest
from replica.api.messages.conversation import without_nonce
from replica.api.messages.errors import TYPES, error_body
from replica.api.messages.requests import parse_count, parse_messages
from replica.api.validation import ApiError

NONCE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def body(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": content}]} | fields


def call(**fields: Any) -> GenerationRequest:
    return parse_messages(orjson.dumps(body(**fields)), "m")


def messages(**fields: Any) -> Any:
    return call(**fields).prompts[0].messages


@pytest.mark.parametrize(
    ("system", "prompt"),
    [
        (None, None),
        ("", None),
        ("Be brief.", "Be brief."),
        (NONCE, None),
        (f"{NONCE}\nBe brief.", "Be brief."),
        (f"Be brief.\n{NONCE}", f"Be brief.\n{NONCE}"),
        ([text(NONCE), text("Be "), text("brief.")], "Be brief."),
        ([text(NONCE + "\nBe "), text(""), text("brief.")], "Be brief."),
        ([], None),
    ],
)
def test_the_system_prompt_without_the_nonce(system: Any, prompt: str | None) -> None:
    head = [] if prompt is None else [{"role": "system", "content": prompt}]
    assert messages(system=system) == [*head, {"role": "user", "content": "Hi"}]


def test_only_the_nonces_line_is_left_out() -> None:
    assert without_nonce(f"{NONCE}\n\nBe brief.\n") == "\nBe brief.\n"
    assert without_nonce("x-anthropic-billing") == "x-anthropic-billing"


def test_system_turns_at_the_head_join_the_system_prompt_and_later_ones_stay() -> None:
    turns = [
        {"role": "system", "content": "Two."},
        {"role": "system", "content": [text(NONCE), text("Three.")]},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [text(f"{NONCE}\nFour.")]},
    ]
    assert messages(system="One.", messages=turns) == [
        {"role": "system", "content": "One.\n\nTwo.\n\nThree."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "Four."},
    ]


def test_calls_results_and_thoughts() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "find", "input": {"a": 1}}
    turns = [
        {"role": "user", "content": [text("Go"), text(" on.")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("So."), used]},
        {
            "role": "user",
            "content": [text("And?"), {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]}],
        },
    ]
    function = {"name": "find", "arguments": {"a": 1}}
    assert messages(messages=turns) == [
        {"role": "user", "content": "Go on."},
        {
            "role": "assistant",
            "content": "So.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "ab"},
        {"role": "user", "content": "And?"},
    ]


def test_documents_that_are_text_can_be_read() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "One."}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("Two.")]}}
    found = {"type": "search_result", "source": "x", "title": "y", "content": [text("Three.")]}
    assert messages(content=[plain, blocks, found])[0]["content"] == "One.Two.Three."


@pytest.mark.parametrize(
    ("last", "end"),
    [("Yes, ", "open"), ([text("Yes")], "open"), ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], "answer")],
)
def test_an_assistants_text_at_the_end_is_continued(last: Any, end: str) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]
    assert call(messages=turns).prompts[0].end == end


def test_tools_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    tools = [
        {"name": "f", "input_schema": schema, "cache_control": EPHEMERAL},
        {"type": "custom", "name": "g", "description": "G.", "input_schema": schema, "eager_input_streaming": True},
        {"type": "bash_20250124", "name": "bash"},
    ]
    assert call(tools=tools).prompts[0].tools == [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g", "description": "G.", "parameters": schema}},
    ]


def test_of_each_ttl_the_last_breakpoint_is_looked_up() -> None:
    system = [text("A", cache_control=HOUR), text("B", cache_control=HOUR), text("C")]
    turns = [{"role": "user", "content": [text("D", cache_control=EPHEMERAL), text("E")]}]
    request = call(system=system, messages=turns)
    assert request.keep_s == 3600.0
    assert request.prompts[0].marks == (
        [{"role": "system", "content": "AB"}],
        [{"role": "system", "content": "ABC"}, {"role": "user", "content": "D"}],
    )
    whole = call(system=system, messages=turns, cache_control=EPHEMERAL)
    assert whole.prompts[0].marks[1] is None
    assert (call(cache_control=EPHEMERAL).keep_s, call().keep_s, call(cache_retention="1h").keep_s) == (300.0, 0.0, 3600.0)


def test_marks_within_a_turn() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a", cache_control=EPHEMERAL), text("b")]}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [text("So."), used]}]
    marked = [*turns, {"role": "user", "content": [result]}]
    (mark,) = call(messages=marked).prompts[0].marks
    assert mark is not None
    assert mark[-1] == {"role": "tool", "tool_call_id": "t1", "content": "a"}
    turns[1]["content"] = [text("So.", cache_control=EPHEMERAL), used]
    (mark,) = call(messages=turns).prompts[0].marks
    assert mark == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So."}]


RESULT = {"type": "tool_result", "tool_use_id": "t9", "content": "x"}
USE = {"type": "tool_use", "id": "t9", "name": "f", "input": {}}


def answered(content: Any) -> Any:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [USE]}, {"role": "user", "content": content}]
    return {"messages": turns}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [5]}, "messages.0.role: Input should be 'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: Input should be"),
        ({"content": []}, "messages.0: all messages must have non-empty content"),
        ({"content": None}, "messages.0: all messages must have non-empty content"),
        ({"content": [5]}, "messages.0.content.0: The block's type does not match any of the expected tags: 'text'"),
        ({"content": [{"type": "video"}]}, "messages.0.content.0: Input tag 'video' does not match"),
        ({"content": [{"type": "text"}]}, "messages.0.content.0.text: Input should be a valid string"),
        ({"content": [IMAGE]}, "messages.0.content.0: image blocks cannot be read: this replica's model reads text only"),
        ({"content": [{**IMAGE, "type": "document"}]}, "messages.0.content.0: document blocks cannot be read"),
        ({"content": [USE]}, "a block of the type 'tool_use' cannot be in a turn of the role 'user'"),
        ({"content": [RESULT]}, "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: t9. Each"),
        (answered([{**RESULT, "tool_use_id": "t8"}]), "messages.2.content.0: unexpected `tool_use_id`"),
        (answered([{**RESULT, "content": [IMAGE]}]), "messages.2.content.0.content.0: image blocks cannot be read"),
        (answered([{**RESULT, "content": [USE]}]), "a tool's result cannot have a block of the type 'tool_use'"),
        (answered([{**RESULT, "content": 5}]), "messages.2.content.0.content: Input should be a valid string or a list"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "a block of the type 'image' cannot be in a turn"),
        ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "an input (an object)"),
        (
            {"messages": [{"role": "system", "content": "x"}, {"role": "system", "content": [IMAGE]}]},
            "messages.1.content.0.type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "at least one message with content",
        ),
        ({"system": 5}, "system: Input should be a valid string or a list of text blocks, not a number"),
        ({"system": [IMAGE]}, "system.0.type: Input should be 'text'"),
        ({"tools": [5]}, "tools.0: Input should be an object"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name: Field required"),
        ({"tools": [{"name": "f", "input_schema": {}, "description": 5}]}, "tools.0.description"),
        ({"tools": [{"type": [], "name": "f"}]}, None),
        ({"tool_choice": {"type": "any"}}, "only allowed together with tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.tool.name: Field required"),
        ({"tool_choice": {"type": "forced"}}, "tool_choice.type must be 'auto', 'any', 'tool' or 'none'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format: Input should be"),
        ({"temperature": 1.5}, "temperature must be a number from 0 to 1, got 1.5"),
        ({"stop_sequences": [""]}, "of 1 to 1024 characters"),
        ({"stop_sequences": ["x" * 1025]}, "of 1 to 1024 characters"),
        ({"stop_sequences": ["x"] * 17}, "at most 16 strings"),
        ({"cache_control": {"type": "ephemeral", "ttl": "24h"}}, "cache_control.ttl: Input should be '5m' or '1h'"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type: Input should be 'ephemeral'"),
        ({"system": [text("a", cache_control=5)]}, "system.0.cache_control.type"),
        (
            {"system": [text("", cache_control=EPHEMERAL)]},
            "system.0.text: cache_control cannot be set for empty text blocks",
        ),
        (
            {"content": [text("a", cache_control=EPHEMERAL)] * 4, "cache_control": EPHEMERAL},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"system": [text("a", cache_control=EPHEMERAL)], "content": [text("b", cache_control=HOUR)]},
            "messages.0.content.0.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m'",
        ),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str | None) -> None:
    if message is None:
        call(**fields)
        return
    for parse in (parse_messages, parse_count):
        if parse is parse_count and {"output_config", "temperature", "stop_sequences"} & fields.keys():
            continue
        with pytest.raises(ApiError) as caught:
            parse(orjson.dumps(body(**fields)), "m")
        assert message in caught.value.message
        assert caught.value.status == 400


def test_many_blocks_and_breakpoints_take_no_longer_than_they_must() -> None:
    """A breakpoint too many is counted, and the conversation up to it is not kept."""
    blocks = [text("a", cache_control=EPHEMERAL)] * 20_000
    with pytest.raises(ApiError, match=r"Found 20000\."):
        call(content=blocks)
    assert messages(content=[text("a")] * 20_000)[0]["content"] == "a" * 20_000
    assert messages(system=[text("a")] * 20_000)[0]["content"] == "a" * 20_000
    with pytest.raises(ApiError, match=r"Found 20000\."):
        call(system=blocks)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 429, 500, 503, 504])
def test_errors_have_anthropics_types(status: int) -> None:
    found = error_body(ApiError(status, "No."), "req")
    assert found["error"]["message"] == "No."
    assert found["error"]["type"] == TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
