"""Whole plain answers as streams, for clients that have asked for a stream and have received its head already. Pure.

    chat, completions   one chunk with everything, the usage if the client wants it, [DONE]
    Messages            message_start, each block: start, one delta, stop; message_delta, message_stop
    Responses           created, in_progress, for each item: added, its texts, done; completed, incomplete or failed

The original pieces of a text are unknown, so each text is one event. A body of another shape raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
_ENDED: Final = ("completed", "incomplete", "failed")  # statuses with an event of their own
# Of a block of Messages: the member that comes in a delta, its empty value, and the name and the member of the delta.
_DELTAS: Final[Mapping[str, tuple[str, Any, str, str]]] = {
    "text": ("text", "", "text_delta", "text"),
    "thinking": ("thinking", "", "thinking_delta", "thinking"),
    "tool_use": ("input", {}, "input_json_delta", "partial_json"),
}


def chunks_of(body: bytes, *, strip_usage: bool) -> bytes:
    """A chat or a completion as a stream. strip_usage: the client has not asked for the usage. O(length)."""
    answer = _object(body)
    choices = [_chunk_choice(choice) for choice in answer.get("choices") or () if isinstance(choice, dict)]
    if not choices:
        raise ValueError("no choices")
    kind = "chat.completion.chunk" if answer.get("object") == "chat.completion" else answer.get("object")
    common = {**answer, "object": kind}
    usage = common.pop("usage", None)
    events = [_data({**common, "choices": choices})]
    if usage is not None and not strip_usage:
        events.append(_data({**common, "choices": [], "usage": usage}))
    return b"".join([*events, DONE])


def _chunk_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if not isinstance(message, dict):
        return choice
    delta, calls = dict(message), message.get("tool_calls")
    if isinstance(calls, list):
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls) if isinstance(call, dict)]
    rest = {name: value for name, value in choice.items() if name != "message"}
    return {**rest, "delta": delta}


def message_events(body: bytes) -> bytes:
    """A message of Messages as a stream. O(length)."""
    message = _object(body)
    content = message.get("content")
    if not isinstance(content, list):
        raise ValueError("no content")
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    events = [named_event("message_start", {"message": begun})]
    for at, block in enumerate(content):
        if isinstance(block, dict):
            events += _block(at, block)
    delta = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    events += [named_event("message_delta", {"delta": delta, "usage": message.get("usage")}), named_event("message_stop", {})]
    return b"".join(events)


def _block(at: int, block: dict[str, Any]) -> list[bytes]:
    deltas, begun = list[dict[str, Any]](), block
    if found := _DELTAS.get(str(block.get("type"))):
        member, empty, kind, written = found
        begun, whole = {**block, member: empty}, block.get(member)
        deltas.append({"type": kind, written: whole if isinstance(whole, str) else orjson.dumps(whole or {}).decode()})
    if isinstance(sign := block.get("signature"), str) and sign:
        begun = {**begun, "signature": ""}
        deltas.append({"type": "signature_delta", "signature": sign})
    return [
        named_event("content_block_start", {"index": at, "content_block": begun}),
        *[named_event("content_block_delta", {"index": at, "delta": delta}) for delta in deltas],
        named_event("content_block_stop", {"index": at}),
    ]


def response_events(body: bytes) -> bytes:
    """A response of Responses as a stream. O(length)."""
    response, number, events = _object(body), -1, list[bytes]()
    if not isinstance(response.get("output"), list):
        raise ValueError("no output")
    for number, (kind, data) in enumerate(events_before_end(response)):
        events.append(named_event(kind, {"sequence_number": number, **data}))
    status = response.get("status")
    last = f"response.{status if status in _ENDED else 'completed'}"
    return b"".join([*events, named_event(last, {"sequence_number": number + 1, "response": response})])


def events_before_end(response: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and members of all events of a response but the last one, without their numbers."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "error": None}
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
    begun = {**item, "status": "in_progress", "content": []} if texts else item
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


def named_event(kind: str, members: dict[str, Any]) -> bytes:
    """An event with this name and type. Raises orjson.JSONEncodeError for members that are nested too deeply."""
    return b"event: %b\n" % kind.encode("ascii") + _data({"type": kind, **members})


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _object(body: bytes) -> dict[str, Any]:
    answer = orjson.loads(body)
    if not isinstance(answer, dict):
        raise ValueError("no object")
    return answer
