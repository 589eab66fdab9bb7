from __future__ import annotations

from typing import Any

import orjson
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.prompt import chat
from gateway.errors import GatewayError


def chat_prompt(body: dict[str, Any], most: int = 0) -> bytes:
    return chat.chat_prompt(body, most).joined()


texts = st.text(max_size=8)
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts})
    | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": texts})}),
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | texts | parts},
        optional={"name": texts, "tool_call_id": texts, "tool_calls": st.lists(st.dictionaries(texts, texts), max_size=2)},
    ),
    min_size=1,
    max_size=4,
)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@given(messages, messages)
def test_a_conversation_that_goes_on_extends_its_prompt(before: list[Any], after: list[Any]) -> None:
    assert chat_prompt({"messages": before + after}).startswith(chat_prompt({"messages": before}))


@given(messages, messages)
def test_different_conversations_have_different_prompts(one: list[Any], two: list[Any]) -> None:
    """Up to differences that templates ignore: no content, empty content, a text or a single text part, no calls, and ids."""

    def plain(message: dict[str, Any]) -> tuple[Any, ...]:
        content = message["content"] or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        others = {key: value for key, value in message.items() if key not in ("content", "tool_call_id") and value != []}
        return others, parts

    assert (chat_prompt({"messages": one}) == chat_prompt({"messages": two})) == ([*map(plain, one)] == [*map(plain, two)])


def test_text_grows_in_place() -> None:
    """An assistant message that is continued keeps its prefix."""
    assert chat_prompt({"messages": [user("Hello wor")]}) + b"ld" == chat_prompt({"messages": [user("Hello world")]})


def test_what_does_not_enter_the_prompt_does_not_change_it() -> None:
    plain = chat_prompt({"messages": [user("x")]})
    assert (
        chat_prompt({"messages": [user("x")], "temperature": 1, "max_tokens": 5, "stream": True, "user": "u", "seed": 3})
        == plain
    )
    assert chat_prompt({"messages": [{"content": "x", "role": "user", "name": None}], "tools": None}) == plain


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]


def test_tools_come_first_wherever_they_are_sent() -> None:
    one = chat_prompt({"messages": [user("x")], "tools": TOOLS})
    assert one == chat_prompt({"tools": TOOLS, "messages": [user("x")]})
    assert one.index(b"function") < one.index(b"user")
    assert one != chat_prompt({"messages": [user("x")]})


def test_the_order_of_keys_that_a_template_prints_counts() -> None:
    """An engine's template prints the keys of a tool as they come: in another order it is another prompt."""
    turned = [{"type": "function", "function": {"name": "f", "parameters": {"a": 2, "z": 1}}}]
    assert chat_prompt({"messages": [user("x")], "tools": TOOLS}) != chat_prompt({"messages": [user("x")], "tools": turned})
    calls = [user(None, tool_calls=[{"function": {"arguments": order}}]) for order in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert chat_prompt({"messages": calls[:1]}) != chat_prompt({"messages": calls[1:]})


def test_the_order_of_a_messages_own_fields_does_not_count() -> None:
    """A template reads them by name."""
    one, two = {"refusal": "t", "reasoning": "r", **user("x")}, {"reasoning": "r", **user("x"), "refusal": "t"}
    assert chat_prompt({"messages": [one]}) == chat_prompt({"messages": [two]})


SHAPING: list[dict[str, Any]] = [
    {"tools": TOOLS},
    {"functions": [{"name": "f"}]},
    {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}},
    {"documents": [{"text": "d"}]},
    {"system": "s"},
    {"reasoning_effort": "high"},
    {"chat_template": "{{ messages }}"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"add_special_tokens": False},
    {"truncate_prompt_tokens": 100},
    {"truncation": "auto"},
    {"mm_processor_kwargs": {"max_pixels": 5}},
    {"cache_prompt": False},
    {"prompt_logprobs": 0},
    {"lora_path": "l"},
    {"extra_key": "e"},
]


def test_whatever_shapes_the_prompt_is_in_its_head() -> None:
    prompts = [chat_prompt({"messages": [user("x")], **more}) for more in [{}, *SHAPING]]
    assert len(set(prompts)) == len(prompts)
    assert all(prompt.endswith(prompts[0]) for prompt in prompts)


def test_what_engines_do_anyway_changes_nothing() -> None:
    usual = {"add_generation_prompt": True, "continue_final_message": False, "truncation": "disabled", "cache_prompt": True}
    assert chat_prompt({"messages": [user("x")], **usual, "echo": False, "tool_choice": "auto"}) == chat_prompt(
        {"messages": [user("x")]}
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": None},
        {"function_call": "none"},
        {"function_call": {"name": "f"}},
    ],
)
def test_which_tool_is_to_be_called_changes_nothing(choice: dict[str, Any]) -> None:
    """Engines print the same tools for every choice (head.py names those that do not)."""
    body = {"messages": [user("x")], "tools": TOOLS}
    assert chat_prompt({**body, **choice}) == chat_prompt(body)


@given(messages, messages, st.sampled_from(SHAPING))
def test_a_conversation_with_a_head_extends_too(before: list[Any], after: list[Any], more: dict[str, Any]) -> None:
    assert chat_prompt({"messages": before + after, **more}).startswith(chat_prompt({"messages": before, **more}))


def part_prompt(part: dict[str, Any]) -> bytes:
    return chat_prompt({"messages": [user([part])]})


def test_a_part_is_more_than_its_text() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "see"},
        {"type": "text", "text": "see", "vendor": 1},
        {"type": "image", "text": "see"},
        {"type": "image", "text": "see", "image": "a"},
        {"type": "image", "text": "see", "image": "b"},
        {"type": ["text"], "text": "see"},
        {"text": "see", "image": "a"},
        {"type": "text", "text": 5},
    ]
    assert len(set(map(part_prompt, parts))) == len(parts)
    assert part_prompt({"text": "see"}) == part_prompt(parts[0]) == chat_prompt({"messages": [user("see")]})


def test_a_moving_cache_marker_does_not_count() -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    for part in ({"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}):
        assert part_prompt({**part, **marker}) == part_prompt(part)
    assert chat_prompt({"messages": [user("x", **marker)]}) == chat_prompt({"messages": [user("x")]})


@pytest.mark.parametrize(
    "messages",
    [
        [user("x")] * 40,
        [user([{"type": "text", "text": "x"}] * 101)],
        [user([{"type": "text", "text": "x"}] * 20)] * 5,
    ],
)
def test_more_parts_than_wanted_are_not_put_together(messages: list[Any]) -> None:
    assert chat_prompt({"messages": messages}) == chat_prompt({"messages": messages}, 400)
    with pytest.raises(NeedsHelper):
        chat_prompt({"messages": messages}, 100)


class Fields(dict[str, Any]):
    """Fields of a message or a part, counted as they are read one by one."""

    read = 0

    def items(self) -> Any:
        for item in super().items():
            self.read += 1
            yield item


def fields(count: int) -> dict[str, Any]:
    return {f"{number:05}": number for number in range(count)}


@pytest.mark.parametrize("value", [1, None, object()])
@pytest.mark.parametrize("before", [0, 20])
def test_fields_of_a_message_that_are_too_many_are_not_read(value: Any, before: int) -> None:
    message = Fields(user("x", **dict.fromkeys(fields(1000), value)))
    with pytest.raises(NeedsHelper):
        chat_prompt({"messages": [user("x", a=1)] * before + [message]}, 1000)
    assert message.read == 0


def test_fields_of_all_messages_are_bounded_together() -> None:
    messages = [Fields(user("x", **fields(100))) for _ in range(100)]
    with pytest.raises(NeedsHelper):
        chat_prompt({"messages": messages}, 1000)
    assert 900 < sum(message.read for message in messages) <= 1000


@pytest.mark.parametrize("fixed", [{"type": "text", "text": "x"}, {"type": "image_url"}, {"text": "x"}])
def test_fields_of_a_part_are_not_read_one_by_one(fixed: dict[str, Any]) -> None:
    """Neither with a marker nor without: a single part may have as many as a body may have values."""
    plain = Fields({**fixed, **fields(1000)})
    marked = Fields({**fixed, "cache_control": {}, **fields(1000)})
    assert chat_prompt({"messages": [user([plain])]}, 100) == chat_prompt({"messages": [user([marked])]}, 100)
    assert plain.read == marked.read == 0


def test_parts_that_are_too_many_with_what_separates_them_are_not_read() -> None:
    assert chat_prompt({"messages": [user([{"text": "x"}] * 49)]}, 100)
    with pytest.raises(NeedsHelper):
        chat_prompt({"messages": [user([{"text": "x"}] * 50 + ["not a part"])]}, 100)


further_fields = st.dictionaries(st.text("ab=\x1fé\uffff\U00010000", max_size=4), st.none() | st.integers(0, 9))


@given(further_fields, further_fields)
def test_further_fields_of_a_message_are_one_digest_in_any_order(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = ({key: value for key, value in each.items() if value is not None} for each in (one, other))
    written = chat_prompt({"messages": [user("x", **one)]})
    assert len(written) == len(b"\x1euser\x1fx") + (len(b"\x1f=\x1a") + 16 if first else 0)
    assert written == chat_prompt({"messages": [user("x", **dict(reversed(one.items())))]})
    assert (written == chat_prompt({"messages": [user("x", **other)]})) == (first == second)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "x" * 60_000},
        {"reasoning": "x" * 60_000},
        {"anything": ["x" * 60_000]},
        {"x" * 60_000: 1},
        {"name": "x" * 60_000},
        {"role": "x" * 60_000},
        {"tool_calls": "x" * 60_000},
        {"tool_calls": [{"id": "1", "type": "function", "junk": "x" * 60_000}]},
    ],
)
def test_what_no_template_prints_has_no_length(fields: dict[str, Any]) -> None:
    plain, more = chat_prompt({"messages": [user("x")]}), chat_prompt({"messages": [user("x") | fields]})
    assert len(plain) < len(more) < len(plain) + 100
    following = [user("x") | fields, {"role": "assistant", "content": "y"}]
    assert chat_prompt({"messages": following}).startswith(more), "it goes on"


@pytest.mark.parametrize("name", ["documents", "chat_template", "instructions", "suffix", "input_ids"])
def test_a_long_field_of_the_head_has_no_length(name: str) -> None:
    bodies = [{"messages": [user("x")], name: ["x" * 60_000 + end]} for end in ("a", "b")]
    one, other = map(chat_prompt, bodies)
    assert one != other
    assert len(one) == len(other) < 100


@pytest.mark.parametrize("name", ["id_slot", "slot_id", "data_parallel_rank", "n_keep"])
def test_what_selects_a_cache_is_in_the_head(name: str) -> None:
    one, other = (chat_prompt({"messages": [user("x" * 1000)], name: value}) for value in (1, 2))
    assert one[:40] != other[:40]


@given(st.dictionaries(st.text("abé", max_size=3), st.integers(0, 9), min_size=1), st.integers(0, 40))
def test_further_fields_of_a_part_keep_their_order(further: dict[str, Any], at: int) -> None:
    items = [*further.items()]
    items[at % len(items) : at % len(items)] = [("text", "x"), ("cache_control", 1), ("type", "text")]
    digest = xxhash.xxh3_128_digest(orjson.dumps(further))
    assert part_prompt(dict(items)) == b"\x1euser\x1fx\x1a" + digest


def test_an_image_stands_as_a_digest() -> None:
    def with_image(url: str) -> bytes:
        return chat_prompt(
            {"messages": [user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}])]}
        )

    assert len(with_image("data:" + "A" * 100_000)) < 5000
    assert with_image("a") == with_image("a") != with_image("b")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [user("x"), {"content": "x"}]}, "messages[1].role"),
        ({"messages": [user(5)]}, "messages[0].content"),
        ({"messages": [user(["x"])]}, "messages[0].content"),
    ],
)
def test_messages_that_are_none_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        chat_prompt(body)
    assert (caught.value.status, caught.value.param) == (400, param)
