"""One conversation has one canonical prompt, whatever the dialect; and one that goes on extends it, also across dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic import prompt as anthropic
from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.prompt import chat
from gateway.dialects.responses import prompt as responses
from tests.gateway.dialects import conversations
from tests.gateway.dialects.conversations import SYSTEMS, TOOLS, TURNS, Call, Turn


def chat_prompt(body: dict[str, Any], most: int = 0) -> bytes:
    return chat.chat_prompt(body, most).joined()


def messages_prompt(body: dict[str, Any], most: int = 0) -> bytes:
    return anthropic.messages_prompt(body, most).joined()


def responses_prompt(body: dict[str, Any], most: int = 0) -> bytes:
    return responses.responses_prompt(body, most).joined()


PROMPTS: dict[str, Callable[..., bytes]] = {
    "chat": lambda *parts: chat_prompt(conversations.chat(*parts)),
    "messages": lambda *parts: messages_prompt(conversations.messages(*parts)),
    "responses": lambda *parts: responses_prompt(conversations.responses(*parts)),
}
DIALECTS = st.sampled_from(sorted(PROMPTS))
NONCE = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"}


@given(SYSTEMS, TOOLS, TURNS.filter(bool))
def test_it_is_the_same_prompt_in_every_dialect(system: list[str], tools: list[Any], turns: list[Turn]) -> None:
    prompts = {name: prompt(system, tools, turns) for name, prompt in PROMPTS.items()}
    assert prompts["messages"] == prompts["chat"]
    assert prompts["responses"] == prompts["chat"]


@given(SYSTEMS, TOOLS, TURNS.filter(bool), TURNS, DIALECTS, DIALECTS)
def test_a_conversation_that_goes_on_in_another_dialect_extends_its_prompt(
    system: list[str], tools: list[Any], turns: list[Turn], more: list[Turn], first: str, second: str
) -> None:
    assert PROMPTS[second](system, tools, turns + more).startswith(PROMPTS[first](system, tools, turns))


@given(SYSTEMS, TOOLS, TURNS.filter(bool), DIALECTS)
def test_ids_do_not_count(system: list[str], tools: list[Any], turns: list[Turn], name: str) -> None:
    assert PROMPTS[name](system, tools, turns, "one") == PROMPTS[name](system, tools, turns, "two")


@given(SYSTEMS, TURNS.filter(bool), st.booleans())
def test_the_billing_line_does_not_count(system: list[str], turns: list[Turn], as_text: bool) -> None:
    body = conversations.messages(system, [], turns)
    plain = messages_prompt(body)
    if as_text:
        body["system"] = f"{NONCE['text']}\n{''.join(system)}" if system else NONCE["text"]
    else:
        body["system"] = [NONCE, *body.get("system", [])]
    assert messages_prompt(body) == plain


TURN = Turn(["hi"], "", "hello", [Call("read", {"path": "a", "lines": [1, 2]}, "text")])


@pytest.mark.parametrize(
    "other",
    [
        Turn(["hi"], "", "hello", [Call("read", {"lines": [1, 2], "path": "a"}, "text")]),  # a template prints them in order
        Turn(["hi"], "", "hello", [Call("read", {"path": "a", "lines": [1, 2]}, "other")]),
        Turn(["hi"], "", "hello", [Call("shell", {"path": "a", "lines": [1, 2]}, "text")]),
        Turn(["hi"], "hm", "hello", [Call("read", {"path": "a", "lines": [1, 2]}, "text")]),
        Turn(["hi"], "", "hello", []),
    ],
)
@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_what_a_template_prints_counts(name: str, other: Turn) -> None:
    assert PROMPTS[name]([], [], [TURN]) != PROMPTS[name]([], [], [other])


def messages(*blocks: dict[str, Any], role: str = "user") -> bytes:
    return messages_prompt({"messages": [{"role": role, "content": [*blocks]}]})


def test_what_a_tool_returns_has_its_size() -> None:
    """A request of 60 kB of results was once taken for one of 6 tokens."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x" * 60_000}
    assert len(messages(result)) > 60_000
    assert len(messages({**result, "content": [{"type": "text", "text": "x" * 60_000}]})) > 60_000
    use = {"type": "tool_use", "id": "t", "name": "write", "input": {"text": "x" * 60_000}}
    assert len(messages(use, role="assistant")) > 60_000
    thoughts = [messages({"type": "thinking", "thinking": "x" * 60_000 + end}, role="assistant") for end in "ab"]
    assert thoughts[0] != thoughts[1]
    assert max(map(len, thoughts)) < 100, "most templates drop it"
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x" * 60_000}}
    assert len(messages(document)) > 60_000
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 66_000}}
    assert 7_000 < len(messages(pdf)) < 9_000, "2,000 tokens"


def test_blocks_that_no_engine_prints_do_not_count() -> None:
    said = {"type": "text", "text": "x"}
    hidden = {"type": "redacted_thinking", "data": "opaque"}
    assert messages(hidden, said, role="assistant") == messages(said, role="assistant")
    cited = {**said, "citations": [{"type": "char_location"}]}
    assert messages(cited, role="assistant") == messages(said, role="assistant")


def test_tools_that_the_server_runs_stand_as_they_are() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    marked = {**search, "cache_control": {"type": "ephemeral"}}
    asked = {"messages": [{"role": "user", "content": "x"}]}
    assert messages_prompt({**asked, "tools": [search]}) == messages_prompt({**asked, "tools": [marked]})
    assert messages_prompt({**asked, "tools": [search]}) != messages_prompt(asked)


@pytest.mark.parametrize(
    ("chat", "messages", "responses"),
    [
        ("none", {"type": "none"}, "none"),
        ("auto", {"type": "auto"}, "auto"),
        ("required", {"type": "any"}, "required"),
        (
            {"type": "function", "function": {"name": "f"}},
            {"type": "tool", "name": "f"},
            {"type": "function", "name": "f"},
        ),
    ],
)
def test_a_choice_of_a_tool_is_the_same_conversation(chat: Any, messages: Any, responses: Any) -> None:
    """Engines keep the tools in the prompt whatever the choice: an agent that forbids a call for one turn goes on warm."""
    tools, turns = [{"name": "f", "schema": {"type": "object"}}], [Turn(["x"], "", "y", [])]
    plain = chat_prompt(conversations.chat([], tools, turns))
    assert chat_prompt({**conversations.chat([], tools, turns), "tool_choice": chat}) == plain
    assert messages_prompt({**conversations.messages([], tools, turns), "tool_choice": messages}) == plain
    assert responses_prompt({**conversations.responses([], tools, turns), "tool_choice": responses}) == plain


def test_allowed_tools_are_another_list() -> None:
    body = conversations.responses([], [], [Turn(["x"], "", "y", [])])
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert responses_prompt({**body, "tool_choice": allowed}) != responses_prompt(body)


def test_the_effort_of_reasoning_reads_alike() -> None:
    turns = [Turn(["x"], "", "y", [])]
    effort = responses_prompt({**conversations.responses([], [], turns), "reasoning": {"effort": "high", "summary": "auto"}})
    assert effort == chat_prompt({**conversations.chat([], [], turns), "reasoning_effort": "high"})


def test_a_developer_is_the_system() -> None:
    items = [{"role": "developer", "content": "s"}, {"role": "user", "content": "x"}]
    assert responses_prompt({"input": items}) == responses_prompt({"instructions": "s", "input": "x"})


def test_items_of_one_answer_are_one_turn_and_those_of_two_are_two() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    one = responses_prompt({"input": [said("a"), call, call]})
    assert one.count(b"\x1eassistant") == 1
    assert responses_prompt({"input": [said("a"), said("b")]}).count(b"\x1eassistant") == 2
    assert responses_prompt({"input": [call, {"type": "reasoning", "summary": []}, call]}).count(b"\x1eassistant") == 2


def test_unknown_items_and_blocks_are_no_errors_and_differ() -> None:
    for path in ("a", "b"):
        assert responses_prompt({"input": [{"type": "item_reference", "id": path}]})
    one, two = ({"type": "item_reference", "id": id_} for id_ in "ab")
    assert responses_prompt({"input": [one]}) != responses_prompt({"input": [two]})
    assert messages({"type": "new", "x": 1}) != messages({"type": "new", "x": 2})
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"}
    assert b"*** Begin" in responses_prompt({"input": [custom]})


# -- bounds


@pytest.mark.parametrize(
    "build",
    [
        lambda most: messages_prompt({"messages": [{"role": "user", "content": "x"}] * 60}, most),
        lambda most: messages_prompt({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60}]}, most),
        lambda most: messages_prompt({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}] * 101}, most),
        lambda most: messages_prompt(
            {"messages": [{"role": "user", "content": "x"}], "system": [{"type": "text", "text": "x"}] * 101}, most
        ),
        lambda most: responses_prompt({"input": [{"role": "user", "content": "x"}] * 60}, most),
        lambda most: responses_prompt({"input": "x", "tools": [{"type": "web_search"}] * 101}, most),
        lambda most: chat_prompt({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}] * 101}]}, most),
    ],
)
def test_more_parts_than_wanted_are_not_put_together(build: Callable[[int], bytes]) -> None:
    assert build(0) == build(1000)
    with pytest.raises(NeedsHelper):
        build(100)


def test_json_within_json_is_counted_before_it_is_read() -> None:
    """Else a body of one text could hold more values than may be parsed in the event loop, or anywhere."""

    def calls(arguments: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}]}

    many, bomb = "[" + "{}," * 40_000 + "1]", "[" + "{}," * 400_000 + "1]"
    with pytest.raises(NeedsHelper):
        chat_prompt(calls(many), 1000)
    assert chat_prompt(calls(many)) == chat_prompt(calls(many.replace(",", ", "))), "it is read elsewhere"
    assert chat_prompt(calls(bomb)) != chat_prompt(calls(bomb.replace(",", ", "))), "it stands as a text"


@pytest.mark.parametrize("arguments", ["", "{", "NaN", "[" * 300 + "]" * 300, '{"a": 1} x'])
def test_arguments_that_are_no_json_are_a_text(arguments: str) -> None:
    body = conversations.chat([], [], [TURN])
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
    other = conversations.chat([], [], [TURN])
    other["messages"][1]["tool_calls"][0]["function"]["arguments"] = f"{arguments} "
    assert chat_prompt(body) != chat_prompt(other)


def test_sizes_that_images_claim_are_bounded() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": conversations.PNG}}
    assert len(messages(*[image] * 10_000)) < 10_000 * 40 + (4 << 20)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": conversations.PNG}},
        {"type": "image_url", "image_url": {"url": conversations.PNG, "more": 1}},
        {"type": "image_url", "image_url": {"url": conversations.PNG}, "more": 1},
        {"type": "image_url", "image_url": 7},
        {"image_url": {"url": conversations.PNG}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "input_image", "file_id": "f"},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
    ],
    ids=str,
)
def test_an_image_is_counted_in_any_form(part: dict[str, Any]) -> None:
    """Its price must not depend on a member that the gateway does not know."""
    content = [part, {"type": "text", "text": "What is it?"}]
    assert chat.chat_prompt({"messages": [{"role": "user", "content": content}]}).images == 1
