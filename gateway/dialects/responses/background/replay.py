"""The stream of a response that has ended, made again from its object: for clients whose events are held no more.

    whole         created, in_progress, for each item: added, its texts, done; then the last event with the whole object
    from N on     the last event alone, as number N + 1: what was between has come, or is in the object

The pieces of a text are not known any more: each text comes as one. Pure.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.responses.background.objects import IN_PROGRESS

_ENDS: Final = frozenset(["completed", "incomplete", "failed", "cancelled"])


def last_event(response: dict[str, Any], number: int) -> bytes:
    """The event with which its stream ends."""
    status = response.get("status")
    kind = f"response.{status if status in _ENDS else 'completed'}"
    return _event(kind, number, {"response": response})


def last_event_of(raw: bytes, number: int) -> bytes:
    """The same of an object as bytes."""
    return last_event(orjson.loads(raw), number)


def replayed(raw: bytes, after: int | None) -> list[bytes]:
    """raw: the object, JSON. after: the last number that the client has, None: it has none. O(length)."""
    response = orjson.loads(raw)
    if after is not None:
        return [last_event(response, after + 1)]
    begun = {**response, "status": IN_PROGRESS, "output": [], "usage": None, "error": None}
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    output = response.get("output")
    for at, item in enumerate(output if isinstance(output, list) else ()):
        if isinstance(item, dict):
            told += _item(at, item)
    events = [_event(kind, number, data) for number, (kind, data) in enumerate(told)]
    return [*events, last_event(response, len(events))]


def _item(at: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of an item of the output."""
    content = item.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = item.get("type") == "message" and all(part.get("type") == "output_text" for part in parts)
    begun = {**item, "status": IN_PROGRESS, "content": []} if texts else item
    told: list[tuple[str, dict[str, Any]]] = [("response.output_item.added", {"output_index": at, "item": begun})]
    for index, part in enumerate(parts if texts else ()):
        place = {"item_id": item.get("id"), "output_index": at, "content_index": index}
        text = part.get("text")
        told += [
            ("response.content_part.added", {**place, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**place, "delta": text, "logprobs": []}),
            ("response.output_text.done", {**place, "text": text, "logprobs": []}),
            ("response.content_part.done", {**place, "part": part}),
        ]
    return [*told, ("response.output_item.done", {"output_index": at, "item": item})]


def _event(kind: str, number: int, data: dict[str, Any]) -> bytes:
    text = orjson.dumps({"type": kind, "sequence_number": number, **data})
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), text)
