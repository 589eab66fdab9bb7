"""The stream of a response that has ended, made again."""

from __future__ import annotations

import json

from gateway.dialects.events.sse import events_of, object_of
from gateway.features.histories.replay import last_event_of, replayed

PART = {"type": "output_text", "text": "hello", "annotations": []}
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [PART]}
WHOLE = {"id": "resp_1", "object": "response", "status": "incomplete", "output": [ITEM]}


def kinds(raw: bytes) -> list[str]:
    return [object_of(event)["type"] for event in events_of(raw)]


def test_its_events_are_numbered_and_made_one_by_one() -> None:
    raw = json.dumps(WHOLE).encode()
    events = list(replayed(raw, None))
    found = [object_of(event) for event in events_of(b"".join(events))]
    assert [event["sequence_number"] for event in found] == list(range(len(events)))
    assert [event["type"] for event in found][-2:] == ["response.output_item.done", "response.incomplete"]
    assert found[-1]["response"] == WHOLE
    assert list(replayed(raw, 7)) == [last_event_of(raw, 8)]


def test_what_cannot_be_taken_apart_comes_as_a_whole() -> None:
    deep = "[" * 300 + "]" * 300
    raw = json.dumps(WHOLE)[:-1].encode() + b', "metadata": {"a": ' + deep.encode() + b"}}"
    assert kinds(b"".join(replayed(raw, None))) == ["response.incomplete"]
    assert raw in last_event_of(raw, 3)
