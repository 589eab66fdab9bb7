"""Trace context: what is valid by the standard, and what goes on of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.tracing.context import (
    LONG_MEMBER,
    MAX_MEMBERS,
    MAX_STATE,
    bounded_tracestate,
    parse_traceparent,
    traceparent,
    with_parent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEX = "0123456789abcdef"


def ids(size: int) -> st.SearchStrategy[str]:
    return st.text(HEX, min_size=size, max_size=size).filter(lambda text: text.strip("0"))


@given(ids(32), ids(16), st.integers(0, 255))
def test_what_is_written_is_read(trace_id: str, span_id: str, flags: int) -> None:
    found = parse_traceparent(traceparent(trace_id, span_id, flags).decode())
    assert found
    assert (found.trace_id, found.span_id, found.flags) == (trace_id, span_id, flags)
    assert found.sampled is bool(flags & 1)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "٣" * 55,
    ],
)
def test_what_is_not_valid_is_refused(header: str) -> None:
    assert parse_traceparent(header) is None


def test_a_later_version_may_have_more() -> None:
    for header in (f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", f" 00-{TRACE}-{SPAN}-01\t"):
        found = parse_traceparent(header)
        assert found
        assert found.sampled


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?", fullmatch=True))
def test_any_text_is_read_as_the_grammar_says(header: str) -> None:
    """The oracle: the grammar of version 00, and of later ones, written down without groups."""
    bare = header.strip(" \t")
    parts = bare.split("-")
    good = (
        len(parts) >= 4
        and [len(part) for part in parts[:4]] == [2, 32, 16, 2]
        and all(set(part) <= set(HEX) for part in parts[:4])
        and parts[0] != "ff"
        and (parts[0] != "00" or len(parts) == 4)
        and bool(parts[1].strip("0") and parts[2].strip("0"))
    )
    assert (parse_traceparent(header) is not None) is good


MEMBER = st.from_regex(rb"[a-z0-9][a-z0-9_@*/-]{0,20}=[!-+\--<>-~]{1,150}", fullmatch=True)


@given(st.lists(MEMBER, max_size=40, unique_by=lambda member: member.partition(b"=")[0]), st.integers(1, 3))
def test_a_tracestate_is_bounded_and_keeps_its_newest(members: list[bytes], headers: int) -> None:
    each = max(1, len(members) // headers)
    values = [b" , ".join(members[start : start + each]) for start in range(0, len(members), each)]
    found = bounded_tracestate(values)
    left = found.split(b",") if found else []
    assert len(found) <= MAX_STATE
    assert [member for member in members if member in left] == left
    if len(members) > MAX_MEMBERS:
        assert not left
    elif len(b",".join(members)) <= MAX_STATE:
        assert left == members
    else:
        short = [member for member in members if len(member) <= LONG_MEMBER]
        assert short[: len(left)] == left


@pytest.mark.parametrize("value", [b"a", b"=1", b"A=1", b"a=1,a=2", b"a=\x01", b"a=b=c", b"a= "])
def test_a_tracestate_that_is_not_valid_is_dropped(value: bytes) -> None:
    assert bounded_tracestate([b"good=1", value]) == b""


NAME = st.sampled_from(
    [b"Accept", b"traceparent", b"TraceParent", b"tracestate", b"TRACESTATE", b"x-tracestate", b"tracestate2"]
)
VALUE = st.from_regex(rb"[!-~]{1,20}", fullmatch=True)


@given(st.lists(st.tuples(NAME, VALUE), max_size=8), st.booleans())
def test_a_parent_takes_the_place_of_any_other(headers: list[tuple[bytes, bytes]], keeps: bool) -> None:
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    out = [tuple(line.split(b": ", 1)) for line in with_parent(lines, b"P", keeps_state=keeps).split(b"\r\n")[:-1]]
    others = [pair for pair in headers if pair[0].lower() not in (b"traceparent", b"tracestate")]
    state = bounded_tracestate([value for name, value in headers if name.lower() == b"tracestate"]) if keeps else b""
    assert out == [*others, (b"traceparent", b"P"), *([(b"tracestate", state)] if state else [])]


def test_a_flood_of_members_is_read_once() -> None:
    lines = b"tracestate: " + b",".join(b"k%d=v" % number for number in range(200_000)) + b"\r\n"
    assert with_parent(lines, b"P", keeps_state=True) == b"traceparent: P\r\n"
    assert not re.search(rb"tracestate", with_parent(lines * 3, b"P", keeps_state=True))
