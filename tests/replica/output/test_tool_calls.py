"""Calls in a text are found, however it is split, and nothing else is lost."""

from collections.abc import Sequence
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.output.tool_calls import Part, ToolCallReader, ToolCallText, parts_of

FIND = '<tool_call>\n{"name": "find", "arguments": {"what": "it"}}\n</tool_call>'
FOUND = ToolCallText("find", '{"what":"it"}')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("Hello.", ["Hello."]),
        (" \n", [" \n"]),
        (FIND, [FOUND]),
        (f"Let me see.\n\n{FIND}\n", ["Let me see.", FOUND]),
        (f"{FIND}\n{FIND}", [FOUND, FOUND]),
        (f"{FIND} That was it.", [FOUND, "That was it."]),
        (FIND.removesuffix("</tool_call>"), [FOUND]),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCallText("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCallText("f", '{"a":1}')]),
        # What is no call stays a text, to the last space.
        ("a <tool_call>{}</tool_call> b", ["a <tool_call>{}</tool_call> b"]),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', ['<tool_call>{"name": 5, "arguments": {}}</tool_call>']),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ['<tool_call>{"name": "f", "arguments": [1]}</tool_call>']),
        ('<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
        (f"<tool_call>no</tool_call> {FIND}", ["<tool_call>no</tool_call>", FOUND]),
        ("a <tool", ["a <tool"]),
        ("a < b </tool_call>", ["a < b </tool_call>"]),
        (f"<tool_call>{'[' * 2000}</tool_call>", [f"<tool_call>{'[' * 2000}</tool_call>"]),
        (
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 400 + "]" * 400}}}}}</tool_call>',
            [f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 400 + "]" * 400}}}}}</tool_call>'],
        ),
    ],
)
def test_the_parts_of_a_text(text: str, parts: list[Part]) -> None:
    assert parts_of(text) == parts


def joined(parts: Sequence[Part]) -> list[Part]:
    """With neighbouring texts as one."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


PIECES = st.sampled_from([FIND, "<tool_call>", "</tool_call>", '{"name": "f"}', " ", "\n", "text", "<", "<tool_ca", "é"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 200), max_size=20))
def test_the_parts_do_not_depend_on_how_the_text_is_split(text: str, cuts: list[int]) -> None:
    reader, parts = ToolCallReader(), list[Part]()
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        parts += reader.push(text[begin:end])
    assert joined(parts + reader.finish()) == parts_of(text)


def test_text_is_not_held_back_without_need() -> None:
    reader = ToolCallReader()
    assert [reader.push(piece) for piece in ("One ", "two", " <", "b> <tool_c", "x")] == [
        ["One"],
        [" two"],
        [],
        [" <b>"],
        [" <tool_cx"],
    ]


def test_a_call_that_no_answer_could_have_stays_a_text() -> None:
    """Messages have a call's arguments as values, some levels deeper than here."""
    called = []
    for depth in range(240, 260):
        text = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * depth + "1" + "}" * depth + "}</tool_call>"
        (part,) = parts_of(text)
        called.append(isinstance(part, ToolCallText))
        if isinstance(part, ToolCallText):
            orjson.dumps({"content": [{"input": orjson.loads(part.arguments)}]})
        else:
            assert part == text
    assert called[0]
    assert not called[-1]
