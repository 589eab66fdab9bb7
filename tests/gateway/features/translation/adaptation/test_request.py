"""What an engine that takes texts only is sent of a chat request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.features.translation.adaptation.request import MAX_BODY, MAX_STOP_CHARS, MAX_STOPS, MAX_VALUES, adapted

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": st.text(max_size=5)}) | ANY)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x"]) | ANY, "content": st.text() | PARTS | ANY}
    )
    | ANY,
    max_size=4,
)
FIELDS = [
    "temperature",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "n",
    "tools",
    "response_format",
    "top_p",
]
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES | ANY}, optional=dict.fromkeys(FIELDS, ANY | st.text() | st.lists(st.text()))
)


def sent(**body: Any) -> dict[str, Any]:
    written: dict[str, Any] = orjson.loads(adapted(orjson.dumps({"model": "m", "messages": [user("hi")], **body})).body)
    return written


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def refusal(**body: Any) -> GatewayError:
    with pytest.raises(GatewayError) as refused:
        sent(**body)
    assert refused.value.status == 400
    return refused.value


@given(BODIES)
def test_whatever_is_asked_only_values_of_known_types_are_sent(body: Any) -> None:
    try:
        raw = orjson.dumps(body)
    except TypeError:  # an integer beyond 64 bits
        return
    try:
        chat = adapted(raw)
    except GatewayError as error:
        refused = error.status
    else:
        _require_known_types(chat.body)
        return
    assert refused == 400


def _require_known_types(body: bytes) -> None:
    written = orjson.loads(body)
    assert written.keys() <= {"messages", "stream", "max_tokens", "seed", "temperature"}
    assert written["stream"] is True
    assert written["messages"]
    for message in written["messages"]:
        assert message.keys() == {"role", "content"}
        assert all(isinstance(value, str) for value in message.values())
    assert isinstance(written.get("temperature", 0.0), float)
    assert type(written.get("seed", 0)) is type(written.get("max_tokens", 0)) is int
    assert all(0 <= written.get(name, 0) < 1 << 31 for name in ("seed", "max_tokens"))
    assert b"\0" not in body


def test_parts_become_a_text_and_developers_a_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, user(parts), {"role": "assistant", "content": None}]
    assert sent(messages=messages)["messages"] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


def test_limits_and_sampling() -> None:
    assert sent(max_tokens=5, seed=-1, temperature=1, top_p=0.5, user="u") == {
        "messages": [user("hi")],
        "stream": True,
        "max_tokens": 5,
        "seed": (1 << 31) - 1,
        "temperature": 1.0,
    }
    assert sent(max_tokens=5, max_completion_tokens=7.0)["max_tokens"] == 7


def test_stops_stay_with_the_gateway() -> None:
    for stop, stops in (("a", ("a",)), (["a", "", "b"], ("a", "b")), (None, ())):
        chat = adapted(orjson.dumps({"model": "m", "messages": [user("hi")], "stop": stop}))
        assert (chat.stops, "stop" in orjson.loads(chat.body)) == (stops, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("n", 2),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"1": 2}),
        ("continue_final_message", True),
    ],
)
def test_what_it_cannot_do_is_named(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.param, error.code) == (field, "not_supported")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [user(7)]}, "messages[0].content"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "a" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1 << 31}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    assert refusal(**body).param == param


def test_its_size_is_bounded() -> None:
    refusal(messages=[user("x" * MAX_BODY)])
    refusal(messages=[user("x")] * MAX_VALUES)
