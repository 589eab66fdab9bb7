"""Where breakpoints stand in a canonical prompt: a turn later they are found again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.api_request import router_prompt
from gateway.dialects.dialect import Dialect
from gateway.dialects.prompt.marks import LOOKBACK, MAX_MARKS
from gateway.dialects.table import Dialects
from router.types import KEY_BYTES

DIALECTS = Dialects()
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "read", "description": "x" * 300, "input_schema": {"type": "object"}}
BLOCK = 16


def dialect(path: str) -> Dialect:
    return DIALECTS.at(path)


def places(body: dict[str, Any], path: str = MESSAGES) -> dict[bytes, int]:
    """The prompt up to each breakpoint -> seconds."""
    api = dialect(path).parse(json.dumps({"model": "m", **body}).encode())
    assert isinstance(api.prompt, bytes)
    return {api.prompt[:offset]: seconds for offset, seconds in sorted(api.breakpoints)}


def marked(body: dict[str, Any], path: str = MESSAGES) -> list[tuple[bytes, int]]:
    """The last characters before each breakpoint."""
    return [(prompt[-3:], seconds) for prompt, seconds in places(body, path).items() if seconds]


def text(of: str, marker: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": of} | ({"cache_control": marker} if marker else {})


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def test_all_that_may_be_marked_is_a_place() -> None:
    call = {"type": "tool_use", "id": "t", "name": "read", "input": {}, "cache_control": SHORT}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("one"), text("two")], "cache_control": SHORT}
    assert marked({"messages": [user(text("abc"))], "system": [text("sys", LONG), text("tem")]}) == [(b"sys", 3600)]
    assert marked({"messages": [user(text("abc"), text("def", SHORT), text("ghi"))]}) == [(b"def", 300)]
    assert marked({"messages": [user(text("abc")), assistant(call), user(result, text("ghi"))]}) == [
        (b'"{}', 300),
        (b"two", 300),
    ]
    assert marked({"messages": [user(text("abc"))], "tools": [{**TOOL, "cache_control": LONG}, TOOL]}) == [(b"}}]", 3600)]
    assert marked({"messages": [user(text("abc"), text("ghi"))], "cache_control": SHORT}) == [(b"ghi", 300)]
    assert marked({"messages": [user(text("abc"))]}) == []


def test_other_dialects_mark_as_well() -> None:
    part = {"text": "abc", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert marked({"messages": [user({"type": "text", **part}, text("def"))]}, CHAT) == [(b"abc", 1800)]
    assert marked({"messages": [user(text("abc", LONG), text("def"))]}, CHAT) == [(b"abc", 3600)]
    assert marked({"messages": [user({"type": "text", "text": "abc", "prompt_cache_breakpoint": None})]}, CHAT) == []
    items = [{"role": "user", "content": [{"type": "input_text", **part}]}, {"role": "user", "content": "more"}]
    assert marked({"input": items}, RESPONSES) == [(b"abc", 1800)]


def test_what_chat_does_not_check_is_read_with_doubt() -> None:
    for marker in ("x", 5, [], {"ttl": ["1h"]}, {"ttl": None}):
        body = {"messages": [user({"type": "text", "text": "abc", "cache_control": marker})]}
        assert marked(body, CHAT) == [(b"abc", 300)]


turns = st.lists(
    st.tuples(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=3), st.text(min_size=1, max_size=40)),
    min_size=2,
    max_size=5,
)


@given(turns, st.booleans())
def test_the_last_breakpoint_is_found_again_a_turn_later(conversation: list[tuple[list[str], str]], top: bool) -> None:
    def body(count: int) -> dict[str, Any]:
        messages = list[Any]()
        for said, answered in conversation[:count]:
            messages += [user(*map(text, said)), assistant(text(answered))]
        messages.pop()
        if top:
            return {"messages": messages, "cache_control": SHORT}
        messages[-1]["content"][-1]["cache_control"] = SHORT
        return {"messages": messages}

    before = [prompt for prompt, seconds in places(body(len(conversation) - 1)).items() if seconds]
    assert len(before) == 1
    assert set(before) <= places(body(len(conversation))).keys()


@pytest.mark.parametrize("path", [MESSAGES, CHAT])
def test_a_flood_of_parts_and_marks_leaves_few_places(path: str) -> None:
    many = [user(*(text(f"{turn} {part} " * 5, LONG if path == CHAT else None) for part in range(50))) for turn in range(50)]
    found = places({"messages": [*many, user(text("last", SHORT))]}, path)
    assert len(found) <= MAX_MARKS + LOOKBACK
    assert sorted(found.values(), reverse=True)[: 4 if path == CHAT else 1] == ([3600] * 3 + [300] if path == CHAT else [300])


def test_in_blocks_a_place_is_the_full_blocks_before_it() -> None:
    body = {"model": "m", "messages": [user(text("a" * 40, LONG), text("b", SHORT))]}
    api = dialect(MESSAGES).parse(json.dumps(body).encode())
    prompt = router_prompt(api, (BLOCK, 64))
    lengths = dict(prompt.breakpoints)
    assert max(lengths.values()) == 3600
    assert all(0 < blocks <= len(prompt.keys) // KEY_BYTES for blocks in lengths)
    assert router_prompt(api, (BLOCK, 64)).breakpoints == prompt.breakpoints, "also when the text is dropped"
