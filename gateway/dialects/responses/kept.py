"""Answers that the gateway keeps: found in what a replica sends, and told to the client as what they are.

A replica is asked not to keep anything, and says so in its answer; the client is told of the gateway instead: `store`,
`previous_response_id` and `conversation` are set in each response object, and no other byte changes.

The last event of a stream is held back, for the client may rely on a response as soon as it has that: first it has to be kept.
Where keeping it takes no time (a WebSocket's memory of its newest response), it goes on at once. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.reader import has_any
from gateway.dialects.events.sse import LONGEST_END, EventData, ends_of, events_of
from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.json_structure import exceeds
from gateway.dialects.responses.history import CONVERSATION, PREVIOUS
from gateway.dialects.responses.ids import is_id
from gateway.dialects.responses.stream import QUIET

MAX_KEPT: Final = 4 << 20  # bytes of an answer; a longer one is not kept
MAX_VALUES: Final = 1 << 17  # in it, as `json_structure` counts them
MAX_NAMES: Final = 1000

_LAST: Final = frozenset(["response.completed", "response.incomplete"])
_FAILED: Final = "response.failed"
_TOLD: Final = QUIET | _LAST | {_FAILED}  # these have a response in them
_MARKS: Final = tuple(name.encode() for name in sorted(_TOLD))


ENDS: Final = ("completed", "incomplete", "failed", "cancelled")  # how a response may have ended


class ClientHistory:
    """What a client is told of its response's history. previous, conversation: ids, "" without one. store: it is to be kept
    here; None: keeping it is the replica's business, and its word for that stays. id, created_at: of a run in the background,
    which has them before a replica is asked; "" for others: the replica's are told.
    """

    __slots__ = ("conversation", "created_at", "id", "previous", "store")

    def __init__(self, previous: str = "", conversation: str = "", *, store: bool | None = True) -> None:
        self.previous = previous
        self.conversation = conversation
        self.store = store
        self.id = ""
        self.created_at = 0

    def edited(self, response: bytes, *, stored: bool) -> bytes:
        """The response object (JSON) as the client reads it. stored: it is kept. Raises ValueError if it is no object."""
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
    """A whole response, as it is to be kept. output: its items as a later request repeats them, JSON, joined by commas. names:
    the ids of these, of MAX_NAMES at most.
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


def kept_of(response: bytes) -> StoredAnswer | None:
    """Of a response object (JSON). None: it is none, or more than is kept. O(length)."""
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
    """An item of an answer as an item of a request: engines write nulls where they take none."""
    plain = {name: value for name, value in item.items() if value is not None}
    for name in ("content", "summary"):
        parts = plain.get(name)
        if isinstance(parts, list):
            plain[name] = [
                {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
                for part in parts
            ]
    return plain


class KeptReader(StreamReader):
    """Between the reader of a stream of Responses and the client. O(bytes).

    response: of the last event, JSON, once that is here, which `holds` says: then `ending` has to be called, and what it
    returns to be sent. A last event that is too long for that goes on as it is. at_once: is called with that response instead,
    and nothing is held.
    """

    def __init__(self, inner: StreamReader, told: ClientHistory, at_once: Callable[[bytes], None] | None = None) -> None:
        super().__init__()
        self.response = b""
        self._inner = inner
        self._told = told
        self._at_once = at_once
        self._held = bytearray()  # an event that is not whole yet
        self._unread = False  # its beginning has gone on: it is too long
        self._last: EventData | None = None
        self._span = (0, 0)  # of the response in it
        self._rest = bytearray()  # after the last event

    @property
    def last_number(self) -> int:
        return self._inner.last_number

    @property
    def passed(self) -> int:
        return self._inner.passed

    @property
    def late(self) -> bool:
        return self._inner.late

    def feed(self, chunk: bytes) -> bytes:
        return self._read(self._inner.feed(chunk))

    def finish(self) -> bytes:
        out = self._read(self._inner.finish())
        rest, self._held = bytes(self._held), bytearray()
        return out + (self._passed(rest) if rest else b"")

    def raise_failure(self) -> None:
        self._inner.raise_failure()

    def ending(self, *, stored: bool) -> bytes:
        """What was held back, for the client. Once."""
        last, start_end, self._last, self.holds = self._last, self._span, None, False
        if last is None:
            return b""
        start, end = start_end
        rest, self._rest = _untold(bytes(self._rest)), bytearray()
        return last.edited([(start, end, self._told.edited(self.response, stored=stored))]) + rest

    def _read(self, data: bytes) -> bytes:
        inner = self._inner
        self.usage, self.done, self.reported, self.enough = inner.usage, inner.done, inner.reported, inner.enough
        if self._last is not None:
            self._rest += data[: MAX_KEPT - len(self._rest)]
            return b""
        if not self._held and not has_any(data, _MARKS) and (data.endswith((b"\n\n", b"\r\n\r\n")) or not data):
            return data
        return self._events(data)

    def _events(self, data: bytes) -> bytes:
        searched = max(0, len(self._held) - LONGEST_END + 1)
        self._held += data
        out, start = list[bytes](), 0
        for end in ends_of(self._held, searched):
            event = bytes(self._held[start:end])
            start = end
            out.append(self._passed(event))
            if self._last is not None:
                self._rest += self._held[start:]
                start = len(self._held)
                break
        del self._held[:start]
        if len(self._held) > MAX_KEPT:
            out.append(bytes(self._held[: 1 - LONGEST_END]))
            del self._held[: 1 - LONGEST_END]
            self._unread = True
        self.within_event = self._unread
        return b"".join(out)

    def _passed(self, event: bytes) -> bytes:
        """What of the event goes on now."""
        if self._unread:
            self._unread = False
            return event
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
        self._last, self._span, self.response, self.holds = data, (start, end), response, True
        return b""


def _untold(rest: bytes) -> bytes:
    """What follows a last event, without further responses: they are not kept, whatever the replica says of them."""
    return b"".join(event for event in events_of(rest) if name_of(event) not in _TOLD)
