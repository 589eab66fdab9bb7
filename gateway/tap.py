"""The usage tap: reads an SSE stream as it passes, and takes out the event that only the gateway asked for.

Engines report the usage of a stream in one event before the end, if asked (`stream_options.include_usage`). The gateway
always asks; if the client had not, that event (no choices, but usage) is not for it and is left out. Every other byte goes
on as it came and at once: only an unfinished event is held, and only when something may have to be taken out of it.

Pure: bytes in, bytes out. Any cutting of the stream into chunks gives the same bytes and the same findings.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from gateway.metering import Usage, parse_usage

MAX_EVENT_BYTES = 1 << 20  # an event beyond this is passed on unread, so that memory stays bounded

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class StreamTap:
    """One stream's tap. usage: what the stream has reported so far."""

    def __init__(self, strip_usage: bool) -> None:
        self.strip_usage = strip_usage
        self.usage: Usage | None = None
        self._held = b""
        self._too_long = False  # the head of the held event was passed on already

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream; returns what may go to the client now."""
        held, data = len(self._held), self._held + chunk
        passed, start = [], 0
        # An event's end may straddle the last chunk and this one: look again at the last three bytes.
        for match in _EVENT_END.finditer(data, max(0, held - 3)):
            event = data[start : match.end()]
            start = match.end()
            if self._passes(event):
                passed.append(event)
        self._held = data[start:]
        passed.append(self._overflow())
        return b"".join(passed) if self.strip_usage else chunk

    def finish(self) -> bytes:
        """The stream is over; returns what was still held (an event without its end)."""
        rest, self._held = self._held, b""
        return rest if rest and self._passes(rest) and self.strip_usage else b""

    def _overflow(self) -> bytes:
        if len(self._held) <= MAX_EVENT_BYTES:
            return b""
        # The last bytes may be the first of an event's end.
        out, self._held = self._held[:-3], self._held[-3:]
        self._too_long = True
        return out

    def _passes(self, event: bytes) -> bool:
        """Learn from one event; False if it is to be taken out."""
        unread = self._too_long or len(event) > MAX_EVENT_BYTES
        self._too_long = False
        if unread or b'"usage"' not in event:
            return True
        data = _event_json(event)
        usage = parse_usage(data) if data else None
        if usage is None:
            return True
        self.usage = usage
        return not (self.strip_usage and _NO_CHOICES.search(event))


def _event_json(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event's data lines, None if there is none."""
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        data = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None
