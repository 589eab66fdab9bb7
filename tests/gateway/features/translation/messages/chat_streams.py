"""Chat streams as engines write them, and what an official client makes of their translation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2 as httpx
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from gateway.dialects.events.sse import events_of, object_of
from gateway.features.translation.messages.translation import MessagesTranslation
from gateway.features.translation.translation import TranslatingReader

DONE = b"data: [DONE]\n\n"
EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def chunk(delta: Any = None, reason: str | None = None, **more: Any) -> bytes:
    """more: further fields of the choice."""
    choice = {"index": 0, "delta": {} if delta is None else delta, "finish_reason": reason, **more}
    data = {"id": "chatcmpl-1f", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def call(index: Any, arguments: str = "", name: str | None = None, id_: str | None = None) -> dict[str, Any]:
    """A delta with a piece of a call."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}


def counted(**usage: Any) -> bytes:
    data = {"id": "chatcmpl-1f", "object": "chat.completion.chunk", "model": "m", "choices": [], "usage": usage}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def translated(chunks: Sequence[bytes], echo: bytes = b"") -> tuple[bytes, TranslatingReader]:
    reader = MessagesTranslation().reader(echo)
    out = b"".join([reader.feed(piece) for piece in chunks])
    return out + reader.finish(), reader


def events(out: bytes) -> list[dict[str, Any]]:
    """Each is valid by the SDK's own types."""
    found = [object_of(event) for event in events_of(out) if not event.startswith(b":")]
    for event in found:
        EVENTS.validate_python(event, strict=True)
    return found


def accumulated(out: bytes) -> Message:
    """What the official client has at the end of a stream. Raises what that raises."""
    answer = httpx.Response(200, content=out, headers={"content-type": "text/event-stream"})
    transport = httpx.MockTransport(lambda request: answer)
    client = anthropic.Anthropic(api_key="k", max_retries=0, http_client=httpx.Client(transport=transport))
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
        return stream.get_final_message()
