from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.prompt import chat_prompt, completion_prompt
from gateway.errors import GatewayError

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
    """Up to what templates do not tell apart: no content, empty content, and a text or a single text part."""

    def plain(message: dict[str, Any]) -> tuple[Any, ...]:
        content = message["content"] or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        others = {key: value for key, value in message.items() if key != "content"}
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


def test_tools_come_first_and_in_any_order_of_keys() -> None:
    one = chat_prompt({"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f"}}]})
    two = chat_prompt({"tools": [{"function": {"name": "f"}, "type": "function"}], "messages": [user("x")]})
    assert one == two
    assert one.index(b"function") < one.index(b"user")
    assert one != chat_prompt({"messages": [user("x")]})


def test_an_image_stands_as_a_digest() -> None:
    def with_image(url: str) -> bytes:
        return chat_prompt(
            {"messages": [user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}])]}
        )

    assert len(with_image("data:" + "A" * 100_000)) < 100
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


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", b"text"), (["one", "two"], b"one"), ([1, 2], [1, 2]), ([[1, 2], [3]], [1, 2]), ("", b"")],
)
def test_a_completions_prompt_is_text_or_token_ids(prompt: Any, expected: Any) -> None:
    assert completion_prompt({"prompt": prompt}, "prompt") == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], 5, {"a": 1}, [1, "x"], [True], [1.5], [None]])
def test_anything_else_is_refused(prompt: Any) -> None:
    with pytest.raises(GatewayError, match="'prompt' must be a string"):
        completion_prompt({"prompt": prompt}, "prompt")
