"""Answers that the gateway stores: read from the replica's bytes, and edited for the client.

A replica is asked to store nothing, and says so in its answer. For the client `store`, `previous_response_id` and
`conversation` are set to the gateway's values in each response object, and no other byte changes.

The last event of a stream is held until the response is stored, because with that event the client may refer to the response.
If storing takes no time (a WebSocket's memory of its latest response), the event passes at once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.sse import EventData, events_of
from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.json_structure import exceeds
from gateway.dialects.responses.ids import is_id
from gateway.dialects.responses.stream import QUIET
from gateway.features.histories.held import LONGEST_EVENT, HeldReader
from gateway.features.histories.history import CONVERSATION, PREVIOUS

MAX_KEPT: Final = LONGEST_EVENT  # bytes of an answer; a longer one is not stored
MAX_VALUES: Final = 1 << 17  # of an answer, counted as in `json_structure`
MAX_NAMES: Final = 1000

_LAST: Final = frozenset(["response.completed", "response.incomplete"])
_FAILED: Final = "response.failed"
_TOLD: Final = QUIET | _LAST | {_FAILED}  # events with a response object
_MARKS: Final = tuple(name.encode() for name in sorted(_TOLD))


ENDS: Final = ("completed", "incomplete", "failed", "cancelled")  # final statuses of a response


class ClientHistory:
    """The client's view of its response's history. previous, conversation: ids, or "". store: the gateway is to store the
    response; None: the replica decides, and its value passes. id, created_at: of a background run, set before a replica is
    asked; "" for other responses, which have the replica's.
    """

    __slots__ = ("conversation", "created_at", "id", "previous", "store")

    def __init__(self, previous: str = "", conversation: str = "", *, store: bool | None = True) -> None:
        self.previous = previous
        self.conversation = conversation
        self.store = store
        self.id = ""
        self.created_at = 0

    def edited(self, response: bytes, *, stored: bool) -> bytes:
        """The response object (JSON) for the client. stored: it is stored. Raises ValueError if it is no object."""
        told = dict[str, bytes]()
        if self.store is not None:
            told["store"] = b"true" if stored and self.store else b"false"
        if self.store is not None or self.previous:
            told[PREVIOUS] = orjson.dumps(self.previous or None)
        elif not self.conversation:
            return response
        members = read_object(response)
        if self.conversation:
            told[CONVERSATION] = orjson.dumps({"id": self.conversation})
        if self.id:
            told |= {"id": orjson.dumps(self.id), "created_at": b"%d" % self.created_at, "background": b"true"}
        return apply(response, members.put_all(told))


class StoredAnswer:
    """A whole response to be stored. output: its items in the form of a later request, JSON, joined by commas. names: ids of
    the items, MAX_NAMES at most.
    """

    __slots__ = ("id", "names", "output", "response", "status")

    def __init__(self, id_: str, status: str, response: bytes, output: bytes, names: tuple[str, ...] = ()) -> None:
        self.id = id_
        self.status = status
        self.response = response
        self.output = output
        self.names = names

    def __repr__(self) -> str:
        return f"<Kept {self.id!r}, {self.status}>"


def stored_answer(response: bytes) -> StoredAnswer | None:
    """Parses a response object (JSON). None: it is no response, or too large to be stored. O(length)."""
    if len(response) > MAX_KEPT or exceeds(response, MAX_VALUES):
        return None
    try:
        found = orjson.loads(response)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    id_, status, output = found.get("id"), found.get("status"), found.get("output")
    if not (is_id(id_) and isinstance(output, list)):
        return None
    items = [item for item in output if isinstance(item, dict)]
    try:
        joined = b",".join(orjson.dumps(_repeatable(item)) for item in items)
    except orjson.JSONEncodeError:  # nested too deeply
        return None
    names = dict.fromkeys(name for item in items if is_id(name := item.get("id")))
    return StoredAnswer(id_, status if status in ENDS else "completed", response, joined, tuple(names)[:MAX_NAMES])


def _repeatable(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as an item of a request: engines write nulls that they do not accept."""
    plain = {name: value for name, value in item.items() if value is not None}
    for name in ("content", "summary"):
        parts = plain.get(name)
        if isinstance(parts, list):
            plain[name] = [
                {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
                for part in parts
            ]
    return plain


class KeptReader(HeldReader):
    """Between the reader of a stream of Responses and the client. O(bytes).

    response: of the last event, JSON, once `holds` says that it has arrived: then the caller sends the result of `ending`. A
    last event that is too long passes unchanged. at_once: if given, it is called with the response, and nothing is held.
    """

    def __init__(self, inner: StreamReader, told: ClientHistory, at_once: Callable[[bytes], None] | None = None) -> None:
        super().__init__(inner, _MARKS)
        self.response = b""
        self._told = told
        self._at_once = at_once
        self._last: EventData | None = None
        self._span = (0, 0)  # of the response in `_last`

    def ending(self, *, stored: bool) -> bytes:
        """The held bytes for the client. Call it once."""
        last, start_end, self._last = self._last, self._span, None
        rest = self.release()
        if last is None:
            return b""
        start, end = start_end
        return last.edited([(start, end, self._told.edited(self.response, stored=stored))]) + _untold(rest)

    def taken(self, event: bytes) -> bytes | None:
        name = name_of(event)
        if name not in _TOLD or len(event) > MAX_KEPT:
            return event
        data = EventData(event)
        if exceeds(data.text, MAX_VALUES):
            return event
        try:
            start, end = read_object(data.text).spans["response"]
            response = data.text[start:end]
            told = self._told.edited(response, stored=name != _FAILED)
        except (ValueError, KeyError, IndexError):
            return event
        if name not in _LAST or self._at_once:
            if name in _LAST and self._at_once:
                self._at_once(response)
            return event if told == response else data.edited([(start, end, told)])
        self._last, self._span, self.response = data, (start, end), response
        return None


def _untold(rest: bytes) -> bytes:
    """The bytes behind a last event without further response objects, which are not stored."""
    return b"".join(event for event in events_of(rest) if name_of(event) not in _TOLD)
