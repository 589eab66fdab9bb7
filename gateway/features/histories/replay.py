"""Replays the stream of an ended response from its object, for clients whose events were dropped.

    whole         created, in_progress, for each item: added, its texts, done; then the last event with the whole object
    from N on     only the last event, with number N + 1: the object contains the events in between

The original pieces of a text are unknown, so each text is one event. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.features.histories.kept import ENDS
from gateway.features.histories.records import IN_PROGRESS


def event_of(kind: str, number: int, response: bytes) -> bytes:
    """An event of the gateway. response: the object, JSON."""
    name = kind.encode("ascii")
    return b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n' % (name, name, number, response)


def last_event_of(raw: bytes, number: int) -> bytes:
    """The last event of the stream of this object (JSON)."""
    return _last(orjson.loads(raw), raw, number)


def replayed(raw: bytes, after: int | None) -> Iterator[bytes]:
    """The events, one at a time. raw: the object, JSON. after: the last event number of the client; None: none. O(length)."""
    response, number = orjson.loads(raw), 0 if after is None else after + 1
    if after is None:
        try:
            for number, (kind, data) in enumerate(_events(response), 1):
                yield _event(kind, number - 1, data)
        except orjson.JSONEncodeError:
            pass  # nested too deeply: only the last event, with the whole object, is sent
    yield _last(response, raw, number)


def _last(response: dict[str, Any], raw: bytes, number: int) -> bytes:
    status = response.get("status")
    return event_of(f"response.{status if status in ENDS else 'completed'}", number, raw)


def _events(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All events but the last one, without their numbers."""
    begun = {**response, "status": IN_PROGRESS, "output": [], "usage": None, "error": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    output = response.get("output")
    for at, item in enumerate(output if isinstance(output, list) else ()):
        if isinstance(item, dict):
            yield from _item(at, item)


def _item(at: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of an item of the output."""
    content = item.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = item.get("type") == "message" and all(part.get("type") == "output_text" for part in parts)
    begun = {**item, "status": IN_PROGRESS, "content": []} if texts else item
    events: list[tuple[str, dict[str, Any]]] = [("response.output_item.added", {"output_index": at, "item": begun})]
    for index, part in enumerate(parts if texts else ()):
        place = {"item_id": item.get("id"), "output_index": at, "content_index": index}
        text = part.get("text")
        events += [
            ("response.content_part.added", {**place, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**place, "delta": text, "logprobs": []}),
            ("response.output_text.done", {**place, "text": text, "logprobs": []}),
            ("response.content_part.done", {**place, "part": part}),
        ]
    return [*events, ("response.output_item.done", {"output_index": at, "item": item})]


def _event(kind: str, number: int, data: dict[str, Any]) -> bytes:
    text = orjson.dumps({"type": kind, "sequence_number": number, **data})
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), text)
