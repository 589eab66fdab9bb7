"""Replays the stream of an ended response from its object, for clients whose events were dropped.

    whole         created, in_progress, for each item: added, its texts, done; then the last event with the whole object
    from N on     only the last event, with number N + 1: the object contains the events in between

The original pieces of a text are unknown, so each text is one event. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.dialects.stream_forms import events_before_end, named_event
from gateway.features.histories.kept import ENDS


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
            for number, (kind, data) in enumerate(events_before_end(response), 1):
                yield named_event(kind, {"sequence_number": number - 1, **data})
        except orjson.JSONEncodeError:
            pass  # nested too deeply: only the last event, with the whole object, is sent
    yield _last(response, raw, number)


def _last(response: dict[str, Any], raw: bytes, number: int) -> bytes:
    status = response.get("status")
    return event_of(f"response.{status if status in ENDS else 'completed'}", number, raw)
