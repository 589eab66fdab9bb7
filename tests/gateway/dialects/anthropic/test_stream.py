"""What a stream of Messages reports of its tokens, and whether that is the last word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.anthropic.stream import MessageReader
from gateway.dialects.usage import Usage

START = {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 1}


def named(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


@pytest.mark.parametrize(
    ("last", "late"),
    [({"output_tokens": 40}, False), ({}, True), ({"output_tokens": -5}, True), ({"input_tokens": 60}, True)],
)
@pytest.mark.parametrize("piece", [1, 50, 1 << 20])
def test_tokens_that_are_counted_at_the_beginning_only_are_not_the_answers(
    last: dict[str, int], late: bool, piece: int
) -> None:
    reader = MessageReader()
    delta = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
    stream = named("message_start", message={"usage": START}) + 40 * delta
    stream += named("message_delta", delta={}, usage=last) + named("message_stop")
    for at in range(0, len(stream), piece):
        reader.feed(stream[at : at + piece])
    assert reader.done
    assert reader.usage == Usage(100, last.get("output_tokens", 1) if not late else 1, 40)
    assert (reader.late, reader.passed) == (late, 40)


@pytest.mark.parametrize(("reason", "cut", "whole"), [("end_turn", 0, True), ("end_turn", 2, True), (None, 0, False)])
def test_a_stream_that_ends_after_its_reason_gets_its_last_event(reason: str | None, cut: int, whole: bool) -> None:
    """cut: bytes of the blank line behind the last event that the engine leaves out."""
    reader, last = MessageReader(), named("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 4})
    out = reader.feed(named("message_start", message={"usage": START}))
    out += reader.feed(named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}))
    out += reader.feed(last[: len(last) - cut]) + reader.finish()
    assert reader.done == whole
    assert out.endswith(b'\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n') == whole
