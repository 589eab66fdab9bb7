"""What passed of a stream that ends before its usage: one token an event, unless the texts are clearly longer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.dialects.anthropic.stream import MessageReader
from gateway.dialects.dialect import StreamReader
from gateway.dialects.openai.stream import ChunkReader
from gateway.dialects.responses.stream import ResponseReader

EVENTS = 200


def chat(text: str) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    choice["logprobs"] = {"content": [{"token": text, "logprob": -0.1, "bytes": list(text.encode()), "top_logprobs": []}]}
    return b"data: " + json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode() + b"\n\n"


def completion(text: str) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "text": text}]}, ensure_ascii=False).encode() + b"\n\n"


def message(text: str) -> bytes:
    data = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return b"event: content_block_delta\ndata: " + json.dumps(data).encode() + b"\n\n"


def response(text: str) -> bytes:
    data = {"type": "response.output_text.delta", "sequence_number": 4, "item_id": "x", "delta": text}
    return b"event: response.output_text.delta\ndata: " + json.dumps(data).encode() + b"\n\n"


READERS: list[tuple[Callable[[], StreamReader], Callable[[str], bytes]]] = [
    (lambda: ChunkReader(strip_usage=True), chat),
    (lambda: ChunkReader(strip_usage=True), completion),
    (MessageReader, message),
    (ResponseReader, response),
]


@pytest.mark.parametrize("together", [1, 7])
@pytest.mark.parametrize(("reader", "event"), READERS)
@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        (" word", EVENTS, EVENTS),
        ("\u4e2d", EVENTS, EVENTS),
        ('"\n', EVENTS, EVENTS),
        (" several words of a text, some ten", 7 * EVENTS, 10 * EVENTS),
        ("\u4e2d\u6587" * 5, 7 * EVENTS, 10 * EVENTS),
    ],
    ids=ascii,
)
def test_tokens_by_the_length_of_events(
    reader: Callable[[], StreamReader], event: Callable[[str], bytes], text: str, least: int, most: int, together: int
) -> None:
    made = reader()
    for _ in range(0, EVENTS, together):
        made.feed(event(text) * together)
    assert least <= made.passed <= most + together * most // EVENTS


@pytest.mark.parametrize(("reader", "event"), READERS)
def test_an_event_beyond_a_samples_size_counts_by_the_text_in_the_sample(
    reader: Callable[[], StreamReader], event: Callable[[str], bytes]
) -> None:
    made = reader()
    made.feed(event(" word" * 1000))
    assert 700 <= made.passed <= 1300
