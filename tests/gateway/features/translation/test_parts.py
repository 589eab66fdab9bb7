"""Chat answers whose content is a list of parts, and streams of one chunk that is written like a whole answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.features.translation.table import TRANSLATIONS
from tests.gateway.features.translation.messages.chat_streams import DONE, accumulated
from tests.gateway.features.translation.responses.streams import ECHO, response_of

PARTS = [
    {
        "type": "thinking",
        "thinking": [{"type": "text", "text": "hm, "}, {"type": "reference"}, 3, {"type": "text", "text": "yes"}],
    },
    {"type": "text", "text": "Hel"},
    {"type": "reference", "reference_ids": [1]},
    {"type": "text", "text": "lo"},
    {"type": "text", "text": 7},
    None,
]
HEAD = {"id": "c", "created": 1, "model": "m"}


def whole(message: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({**HEAD, "object": "chat.completion", "choices": [choice]}).encode()


@pytest.mark.parametrize("content", [PARTS, "Hello"])
def test_a_plain_answer(content: Any) -> None:
    body = whole({"role": "assistant", "content": content})
    message = json.loads(TRANSLATIONS["messages"].answer(body, b""))
    response = json.loads(TRANSLATIONS["responses"].answer(body, ECHO))
    assert [block["text"] for block in message["content"] if block["type"] == "text"] == ["Hello"]
    assert [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"] == ["Hello"]
    if content is PARTS:
        assert message["content"][0]["thinking"] == "hm, yes" == response["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("field", ["delta", "message"])
@pytest.mark.parametrize("content", [PARTS, "Hello"])
def test_a_stream(field: str, content: Any) -> None:
    choice = {"index": 0, field: {"role": "assistant", "content": content}, "finish_reason": "stop"}
    data = b"data: " + json.dumps({**HEAD, "choices": [choice]}).encode() + b"\n\n" + DONE
    message, response = (
        reader.feed(data) + reader.finish()
        for reader in (TRANSLATIONS["messages"].reader(b""), TRANSLATIONS["responses"].reader(ECHO))
    )
    assert [block.text for block in accumulated(message).content if block.type == "text"] == ["Hello"]
    assert response_of(response).output_text == "Hello"
