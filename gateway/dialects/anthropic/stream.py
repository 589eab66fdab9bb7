"""The reader of Anthropic's streams: passes events on, and notes the usage, the end and the engine's error.

    message_start
    content_block_start, content_block_delta ..., content_block_stop        for each block
    message_delta, message_stop

A `ping` may come anywhere, and an `error` may replace all remaining events. An error event whose name is only in its data is
dropped: the gateway's own error follows, because the stream ends without `message_stop`. If only that is missing, because the
stream ends in order after its stop reason, it is added. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.dialects.anthropic.errors import failure_of, full_context_error
from gateway.dialects.anthropic.usage import is_split, merge, usage_from
from gateway.dialects.events.named import NamedReader, has_name, name_of
from gateway.dialects.events.passed_tokens import EventSamples, texts_in
from gateway.dialects.events.reader import has_any, has_any_but
from gateway.dialects.events.sse import data_of, object_of
from gateway.dialects.full_context import full_context
from gateway.errors import ReplicaFailure

OPENING: Final = "message_start"

_END: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_FORM: Final = frozenset(["id", "type"])  # members of a block or a delta without output

_READ: Final = (b"message_", b"event: error", b"event:error", b'"error"')  # every event that is parsed has one of them
_TEXTS: Final = texts_in("text", "thinking", "partial_json")
_BLOCK: Final = b"event: content_block_"
_TEXT: Final = b'"text":"'  # within a text the quotes are escaped
_QUOTE: Final = 0x22
_DELTA: Final = b'"content_block_delta"'  # once in an event; within a text the quotes are escaped


class MessageReader(NamedReader):
    """Reads one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = dict[str, Any]()
        self._deltas = 0
        self._samples = EventSamples()
        self._counted = 0  # deltas received when the answer's tokens were last counted
        self._stopped = False  # the answer has its stop reason

    def feed(self, chunk: bytes) -> bytes:
        if self.started and self.are_whole(chunk) and not has_any(chunk, _READ):
            self.within_event = False
            self._deltas += chunk.count(_DELTA)
            if self._deltas >= self._samples.next:
                self._samples.add(self._deltas, chunk)
            return chunk  # nearly all chunks of nearly all streams
        return self.read(chunk)

    @property
    def passed(self) -> int:
        if self.done and self.usage is not None:
            return self._deltas
        return self._samples.tokens(self._deltas, _DELTA, _TEXTS)

    @property
    def late(self) -> bool:
        return self.usage is not None and self._deltas - self._counted > 1

    def begins(self, event: bytes) -> None:
        if event.startswith(_BLOCK):
            at = event.find(_TEXT) + len(_TEXT)
            if len(_TEXT) <= at < len(event):  # nearly all streams
                self.started = event[at] != _QUOTE
                return
        name = name_of(event)
        if name == "content_block_delta":
            part = object_of(event).get("delta")
        elif name == "content_block_start":
            part = object_of(event).get("content_block")
        else:
            self.opened = self.opened or name == OPENING
            return
        self.started = isinstance(part, dict) and has_any_but(_FORM, part)

    def failure_in(self, event: bytes) -> ReplicaFailure | None:
        if event.find(b"error") < 0:
            return None
        if name_of(event) == "error" and (full := full_context(data_of(event).strip())):
            full.complete(0, None)
            self.instead, self.done = b"event: error\ndata: %b\n\n" % full_context_error(full, ""), True
            return None
        return failure_of(event)

    def passes(self, event: bytes, *, unread: bool) -> bool:
        if unread or self.done:
            return True
        if self.started and event.find(_DELTA) >= 0:
            self._deltas += 1
            if self._deltas >= self._samples.next:
                self._samples.add(self._deltas, event)
        name = name_of(event)
        if name == "message_stop":
            self.done = True
        elif name == "message_delta":
            data = object_of(event)
            self._merge(data.get("usage"))
            self._count()
            delta = data.get("delta")
            self._stopped = isinstance(delta, dict) and bool(delta.get("stop_reason"))
        elif name == "message_start":
            message = object_of(event).get("message")
            self._merge(message.get("usage") if isinstance(message, dict) else None)
            if is_split(self._counts):
                self._count()
        elif name == "error":
            if not has_name(event):  # clients ignore it, and would take the events before it for the whole answer
                return False
            self.reported = failure_of(event)
            self.done = self.reported is None
        return True

    def finish(self) -> bytes:
        rest = super().finish()
        if self.done or self.within_event or self._held or self.reported or not self._stopped:
            return rest  # it is complete, or was cut
        self.done = True
        return rest + b"\n\n" + _END if rest else _END

    def _merge(self, usage: Any) -> None:
        if merge(self._counts, usage):
            self._counted = self._deltas

    def _count(self) -> None:
        self.usage = usage_from(self._counts) or self.usage
