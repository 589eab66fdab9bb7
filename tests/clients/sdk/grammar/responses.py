"""A stream of OpenAI's Responses.

    response.created  response.in_progress  (item)*  response.completed | .incomplete | .failed
    item:    output_item.added(index)  (part)*  output_item.done(index)            indexes from 0, as they begin
    part:    content_part.added  TEXT.delta*  TEXT.done  content_part.done         of messages and reasoning
    call:    ARGUMENTS.delta*  ARGUMENTS.done                                       calls may be open beside each other

`sequence_number` counts from 0. Every `done` says what its deltas have said, each `output_item.done` what its parts were, and
the response at the end has these items. `error` may come before `response.failed`, or be the end.
"""

from __future__ import annotations

import json
from typing import Any, Final, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_UNION: Final = get_args(get_args(ResponseStreamEvent)[0])
EVENTS: Final[dict[str, TypeAdapter[Any]]] = {
    get_args(event.model_fields["type"].annotation)[0]: TypeAdapter(event) for event in _UNION
}
RESPONSE: Final[TypeAdapter[Response]] = TypeAdapter(Response)
# In OpenAI's own answers, and not in the SDK's types.
UNTYPED: Final = {"response.function_call_arguments.done": "name"}
ENDS: Final = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
# By the kind of a part: its events, and the field of the text.
PARTS: Final = {
    "output_text": ("output_text", "text"),
    "refusal": ("refusal", "refusal"),
    "reasoning_text": ("reasoning_text", "text"),
    "summary_text": ("reasoning_summary_text", "text"),
}
CALLS: Final = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
ADDED: Final = {"content_part.added": "content_index", "reasoning_summary_part.added": "summary_index"}
DONE: Final = {"content_part.done": "content", "reasoning_summary_part.done": "summary"}


class Item:
    """An item of the output while it is written. part: the open one; said: its text so far, or the call's arguments."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.parts: dict[str, list[Any]] = {"content": [], "summary": []}
        self.part: dict[str, Any] | None = None
        self.said = ""
        self.settled = False  # what was said is done

    def event(self, kind: str, event: dict[str, Any]) -> None:
        assert event["item_id"] == self.item["id"]
        if kind in ADDED:
            assert self.part is None, "parts come one after the other"
            assert event[ADDED[kind]] == len(self.parts["summary" if "summary" in kind else "content"])
            self.part, self.said, self.settled = event["part"], "", False
            assert self.part[PARTS[self.part["type"]][1]] == ""
        elif kind in DONE:
            self.end_part(DONE[kind], event["part"])
        else:
            self.text(kind, event)

    def text(self, kind: str, event: dict[str, Any]) -> None:
        name, field = PARTS[self.part["type"]] if self.part else CALLS[self.item["type"]]
        assert not self.settled, f"{kind} after its end"
        if kind == f"{name}.delta":
            self.said += event["delta"]
        else:
            assert kind == f"{name}.done", (kind, self.part)
            assert event[field] == self.said, "the end says what the deltas have said"
            self.settled = True

    def end_part(self, where: str, part: dict[str, Any]) -> None:
        assert self.part is not None
        assert self.settled, "the text ends before its part"
        assert part["type"] == self.part["type"]
        assert part[PARTS[part["type"]][1]] == self.said
        self.parts[where].append(part)
        self.part = None

    def end(self, item: dict[str, Any]) -> None:
        assert self.part is None, "an item ends after its parts"
        assert (item["id"], item["type"]) == (self.item["id"], self.item["type"])
        if item["type"] in CALLS:
            assert self.settled
            assert item[CALLS[item["type"]][1]] == self.said
            assert (item["name"], item["call_id"]) == (self.item["name"], self.item["call_id"])
            return
        for where, parts in self.parts.items():
            assert (item.get(where) or []) == parts, where


def response_of(frames: list[tuple[str, bytes]], *, foreign: bool = False) -> dict[str, Any] | None:
    """The response at the end; None: the stream ends with an error. Fails where it is no such stream."""
    events = [parsed(name, data, foreign=foreign) for name, data in frames]
    assert events, "no event"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))
    kinds = [event["type"] for event in events]
    assert kinds[-1] in ENDS or kinds[-1] == "error", f"a stream that ends with {kinds[-1]}"
    assert not set(kinds[:-1]) & set(ENDS)
    if kinds == ["error"]:
        return None
    assert kinds[:2] == ["response.created", "response.in_progress"] or kinds[1:] in (["error"], ["error", "response.failed"])
    identity = {event["response"]["id"] for event in events if "response" in event}
    assert len(identity) == 1, "one response has one id"
    assert events[0]["response"]["output"] == []
    done = items_of([event for event in events if "response" not in event])
    if kinds[-1] == "error":
        return None
    response: dict[str, Any] = events[-1]["response"]
    # vLLM ends an incomplete response with response.completed.
    assert response["status"] == ENDS[kinds[-1]] or (foreign and response["status"] == "incomplete")
    if kinds[-1] != "response.failed":
        assert "error" not in kinds
        assert response["output"] == done, "the response is the sum of its items"
    return response


def parsed(name: str, data: bytes, *, foreign: bool) -> Any:
    event = json.loads(data)
    assert event["type"] == name, (name, event)
    known = {key: value for key, value in event.items() if key != UNTYPED.get(name)}
    if "response" in event:
        known["response"] = typed(event["response"])
    extra: Any = "allow" if foreign or name == "error" else "forbid"
    EVENTS[name].validate_json(json.dumps(known), strict=True, extra=extra)
    return event


def typed(response: dict[str, Any]) -> dict[str, Any]:
    """Without `store`: OpenAI's answers have it, the SDK's types do not."""
    return {key: value for key, value in response.items() if key != "store"}


def items_of(events: list[dict[str, Any]]) -> list[Any]:
    """The finished items. The last of a stream that fails may be open."""
    items, done = list[Item](), dict[int, Any]()
    failed = any(event["type"] == "error" for event in events)
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "error":
            assert event is events[-1]
        elif kind == "output_item.added":
            assert event["output_index"] == len(items)
            others = [item for at, item in enumerate(items) if at not in done]
            assert all(item.item["type"] in CALLS for item in others), "only calls may be open beside another item"
            items.append(Item(event["item"]))
        else:
            at = event["output_index"]
            assert at not in done, f"{kind} after the end of its item"
            if kind == "output_item.done":
                items[at].end(event["item"])
                done[at] = event["item"]
            else:
                items[at].event(kind, event)
    assert failed or len(done) == len(items), "every item ends"
    return [done[at] for at in sorted(done)]
