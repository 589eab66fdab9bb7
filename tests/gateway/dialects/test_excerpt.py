"""What the log has of an engine's error body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.excerpt import MAX_EXCERPT, MAX_READ, excerpt


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "out of memory", "type": "t", "code": 500}},  # OpenAI, vLLM, llama.cpp
        {"object": "error", "message": "out of memory"},  # SGLang, older vLLM
        {"error": "out of memory", "error_type": "t"},  # TGI
        {"detail": "out of memory"},  # FastAPI
    ],
)
def test_the_message_of_each_engines_error(body: Any) -> None:
    assert excerpt(json.dumps(body).encode()) == "out of memory"


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"Internal Server Error", "Internal Server Error"),
        (b"", ""),
        (b"[1]", "[1]"),
        (b'{"error": {"message": 7}}', '{"error": {"message": 7}}'),
        (b'{"error": {"message": "half', '{"error": {"message": "half'),
        (b'{"error": "a\\u001b[31m\\u0000b\\n{\\u202e}"}', "a [31m b { }"),
        (b"\xff\x1b\x07", "\N{REPLACEMENT CHARACTER}"),
        (b"[" * MAX_READ, "[" * (MAX_EXCERPT - 3) + "..."),
        (b'{"error": "' + b"x" * MAX_READ + b'"}', '{"error": "' + "x" * (MAX_EXCERPT - 14) + "..."),
    ],
)
def test_other_bodies_are_shown_as_they_begin(body: bytes, shown: str) -> None:
    assert excerpt(body) == shown


@given(st.binary() | st.text().map(lambda text: json.dumps({"error": {"message": text}}).encode()))
def test_it_is_short_and_printable_whatever_the_body(body: bytes) -> None:
    shown = excerpt(body)
    assert len(shown) <= MAX_EXCERPT
    assert shown.isprintable()


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=MAX_EXCERPT))
def test_a_short_plain_message_is_whole(text: str) -> None:
    assert excerpt(json.dumps({"message": text, "x": 1}).encode()) == (text or '{"message": "", "x": 1}')
