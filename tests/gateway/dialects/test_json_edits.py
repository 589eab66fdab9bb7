"""Edits of JSON texts: one value changes, every other byte stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.json_edits import append_element, append_text, apply, read_list, read_object
from tests.gateway.dialects.test_openai_request import parse

spaces = st.text(" \t\r\n", max_size=3)
# Names that meet: with escapes, twice, and parts of each other.
names = st.sampled_from(["a", "stream_options", "stream", "include_usage", "", 'q"', "\\", "é", "😀", "b" * 20]) | st.text(
    max_size=3
)


@st.composite
def json_string(draw: st.DrawFn, value: str) -> str:
    """A string as JSON may write it: any character may be an escape."""
    out = []
    for char in value:
        plain = json.dumps(char, ensure_ascii=False)[1:-1]
        escaped = "".join(f"\\u{unit:04x}" for unit in memoryview(char.encode("utf-16-le", "surrogatepass")).cast("H"))
        out.append(draw(st.sampled_from([plain, escaped])))
    return '"' + "".join(out) + '"'


@st.composite
def json_text(draw: st.DrawFn, depth: int = 3) -> str:
    """Any JSON value as any client may write it: white space, escapes, duplicate keys, numbers beyond 64 bits."""
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
    scalars = st.sampled_from(["null", "true", "false", "0", "-1.5e300", "12345678901234567890123", "1E2"]) | json_string(text)
    kind = draw(st.integers(0, 2)) if depth else 0
    if kind == 0:
        return draw(scalars)
    if kind == 1:
        items = [draw(json_text(depth - 1)) for _ in range(draw(st.integers(0, 3)))]
        return "[" + draw(spaces) + ",".join(draw(spaces) + item + draw(spaces) for item in items) + "]"
    return draw(json_object(depth=depth))


@st.composite
def json_object(draw: st.DrawFn, depth: int = 3, least: int = 0) -> str:
    members = []
    for _ in range(draw(st.integers(least, 4))):
        name, value = draw(names.flatmap(json_string)), draw(json_text(depth - 1))
        members.append(draw(spaces) + name + draw(spaces) + ":" + draw(spaces) + value + draw(spaces))
    return "{" + draw(spaces) + ",".join(members) + "}"


def spaced(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """As a body may have it, white space around it."""
    return st.tuples(spaces, text, spaces).map("".join).map(str.encode)


@given(spaced(json_object()))
def test_the_members_of_an_object_are_those_that_a_parser_finds(raw: bytes) -> None:
    found = {name: json.loads(raw[slice(*span)]) for name, span in read_object(raw).spans.items()}
    assert found == json.loads(raw)
    assert read_object(raw).end == len(raw.rstrip())


@given(spaced(json_object()), names, json_text())
def test_a_member_is_put_and_no_other_byte_changes(raw: bytes, name: str, value: str) -> None:
    members = read_object(raw)
    start, end, new = members.put(name, value.encode())
    changed = apply(raw, [(start, end, new)])
    assert changed[:start] == raw[:start]
    assert changed[start + len(new) :] == raw[end:]
    assert json.loads(changed) == {**json.loads(raw), name: json.loads(value)}
    assert (start, end) == members.spans.get(name, (start, start)), "only the value itself is replaced"


@given(spaced(st.lists(json_text(), max_size=3).map(lambda items: "[" + ",".join(items) + "]")), json_text())
def test_a_list_gets_one_more_element(raw: bytes, value: str) -> None:
    at = len(raw) - len(raw.lstrip())
    assert [json.loads(raw[slice(*span)]) for span in read_list(raw, at)[0]] == json.loads(raw)
    assert json.loads(apply(raw, [append_element(raw, at, value.encode())])) == [*json.loads(raw), json.loads(value)]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_a_string_gets_longer(text: str, more: str, data: st.DataObject) -> None:
    raw = data.draw(json_string(text)).encode()
    changed = apply(raw, [append_text(raw, len(raw), more)])
    assert changed.startswith(raw[:-1])
    assert json.loads(changed) == text + more


@given(spaced(json_object(least=1)), st.lists(st.tuples(names, json_text()), max_size=4, unique_by=lambda item: item[0]))
def test_several_edits_at_once(raw: bytes, values: list[tuple[str, str]]) -> None:
    members = read_object(raw)
    edits = [members.put(name, value.encode()) for name, value in reversed(values)]
    assert json.loads(apply(raw, edits)) == {**json.loads(raw), **{name: json.loads(value) for name, value in values}}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a"', '{"a":', '{"a":1', '{"a":[}', '{"a":[1', '{"a" 1}', '{"a":1 "b":2}', "{a:1}", '{"a":"']
)
def test_what_is_no_object_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        read_object(text.encode())


def test_a_scan_may_be_bounded() -> None:
    raw = b'{"a":[' + b",".join([b"[]"] * 100) + b"]}"
    assert read_object(raw, most=300).spans == {"a": (5, len(raw) - 1)}
    with pytest.raises(ValueError, match="too many"):
        read_object(raw, most=150)


# -- the one thing that is added to a request

REST = '"messages":[{"role":"user","content":"x"}],"model":"m","stream":true'
options = st.sampled_from(["null", "{}", "{ }"]) | json_object()


@given(json_object(), options | st.none(), spaces, spaces, st.sampled_from(['"stream_options"', '"stream\\u005foptions"']))
def test_a_stream_is_asked_for_usage_and_no_other_byte_changes(
    vendor: str, wanted: str | None, before: str, after: str, name: str
) -> None:
    """Numbers beyond 64 bits, the order of keys, escapes, white space: all of it reaches the engine as it was sent."""
    member = "" if wanted is None else f",{name} :{before}{wanted}{after}"
    raw = f'{before}{{"vendor":{vendor},{REST}{member},"seed":12345678901234567890123{after}}}{after}\n'.encode()
    sent = parse(raw).body
    expected: dict[str, Any] = json.loads(raw)
    asks = (expected.get("stream_options") or {}).get("include_usage") is True
    assert (sent == raw) is asks
    expected["stream_options"] = {**(expected.get("stream_options") or {}), "include_usage": True}
    assert json.loads(sent) == expected
    assert list(json.loads(sent)["vendor"]) == list(expected["vendor"]), "a guided engine follows this order"
    same = next((at for at, (one, other) in enumerate(zip(raw, sent, strict=False)) if one != other), len(raw))
    tail = next((at for at, (one, other) in enumerate(zip(raw[::-1], sent[::-1], strict=False)) if one != other), len(raw))
    assert same + tail >= len(raw) - len((wanted or "").encode()), "what differs is in one place"


def test_the_last_of_several_options_counts() -> None:
    raw = b'{"stream_options":{"include_usage":true},"stream_options":{"include_usage":false},%b}' % REST.encode()
    assert parse(raw).body == raw.replace(b"false", b"true")
