"""A prompt of text has at most a token for each byte; parts that stand for something else show no such bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import DIALECTS
from gateway.parser import wire

PARTS: dict[str, tuple[dict[str, Any], bool]] = {
    "text": ({"type": "text", "text": "hello"}, True),
    "marked text": ({"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}, True),
    "a picture": ({"type": "image_url", "image_url": {"url": "https://x.example/1.png"}}, False),
    "a film": ({"type": "video_url", "video_url": {"url": "https://x.example/1"}}, False),
    "a file elsewhere": ({"type": "document", "source": {"type": "url", "url": "https://x.example/1.pdf"}}, False),
}


def parsed(path: str, content: list[dict[str, Any]]) -> ApiRequest:
    name = "input" if path == "/v1/responses" else "messages"
    body = {"model": "m", "max_tokens": 5, name: [{"role": "user", "content": content}]}
    return DIALECTS[path].parse(json.dumps(body).encode())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_prompt_is_textual_if_all_its_parts_are(kind: str, path: str) -> None:
    part, textual = PARTS[kind]
    api = parsed(path, [{"type": "text", "text": "look"}, part])
    assert api.textual is textual
    assert wire.request_of(wire.parsed_body(api), api.body).textual is textual, "from the parser process, too"


def test_the_bytes_of_other_requests_show_no_bound() -> None:
    """An upgrade request has no body, and sounds are sent as files."""
    assert not ApiRequest("m", None, "", stream=False, metered=True, body=b"").textual
