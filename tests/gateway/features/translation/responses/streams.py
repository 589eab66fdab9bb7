"""Chat streams, and what the SDK of OpenAI makes of their translation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.features.translation.responses.translation import ResponsesTranslation
from gateway.features.translation.translation import TranslatingReader

TRANSLATION = ResponsesTranslation()
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CUSTOM = {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mcp__cal__", "description": "A calendar.", "tools": [ADD]}
BODY = {
    "model": "m",
    "input": "x",
    "instructions": "s",
    "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}, CUSTOM, SPACE],
    "metadata": {"a": "b"},
}
ECHO = TRANSLATION.request(json.dumps(BODY).encode()).echo
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
DONE = b"data: [DONE]\n\n"


def chunk(delta: Any = None, reason: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: %b\n\n" % json.dumps({"id": "chatcmpl-1", "created": 17, "choices": choices, **more}).encode()


def stream(*deltas: Any, reason: str = "stop", usage: Any = USAGE) -> bytes:
    said = b"".join([chunk(delta) for delta in deltas])
    return chunk({"role": "assistant", "content": ""}) + said + chunk({}, reason) + chunk(usage=usage) + DONE


def call(index: Any = 0, name: Any = None, arguments: Any = None, call_id: Any = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    given = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return {"tool_calls": [{**given, "function": function}]}


def translated(chunks: Sequence[bytes]) -> tuple[bytes, TranslatingReader]:
    reader = TRANSLATION.reader(ECHO)
    out = b"".join([reader.feed(piece) for piece in chunks])
    return out + reader.finish(), reader


def events_of(out: bytes) -> list[Any]:
    """Each validated by the SDK's types; names and numbers are as they should be."""
    found = list[Any]()
    for number, event in enumerate(out.split(b"\n\n")[:-1]):
        name, data = event.split(b"\n")
        value = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + value["type"].encode()
        assert value["sequence_number"] == number
        found.append(EVENTS.validate_python(value))
    return found


def response_of(out: bytes) -> Response:
    """The response at the end, equal to what the SDK has accumulated from the events before it."""
    events, state = events_of(out), ResponseStreamState[Any](input_tools=[], text_format=omit)
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    for event in events:
        state.handle_event(event)
    response: Response = events[-1].response
    assert [done[index] for index in sorted(done)] == response.output, "each item was done, under its index"
    assert sorted(done) == list(range(len(done)))
    return response
