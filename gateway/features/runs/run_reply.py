"""The reply to a run, which has no client connection.

    a stream ──────────────► its complete events ──► Run.take
    a plain answer ────────► held until complete, at most `RunFormat.max_answer` bytes ──► Run.plain_answer, then stored
    an error ──────────────► Run.body: the reason

Small plain answers are stored earlier, during delivery. Held bytes are charged to the request's lease.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.sse import data_of
from gateway.features.runs.run import Run
from gateway.request.client import ClientReply
from gateway.request.whole_events import WholeEvents
from gateway.upstream.client import PausableSource

MAX_ERROR: Final = 64 << 10  # bytes of an error's body

_STREAM: Final = re.compile(rb"(?:^|\r\n)content-type: ?text/event-stream", re.IGNORECASE)


class RunReply(ClientReply):
    """Collects the reply to a run."""

    def __init__(self, run: Run, lease: MemoryLease) -> None:
        super().__init__()
        self.keep_alive = True
        self._run = run
        self._lease = lease
        self._events: WholeEvents | None = None
        self._plain: bytearray | None = None

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun = True
        run = self._run
        run.status, run.body = status, b""
        if status == 200:
            run.progress()
            if _STREAM.search(headers):
                self._events = WholeEvents(self._lease)
            elif not run.storing:
                self._plain = bytearray()
        self.write(first)

    def write(self, data: bytes) -> None:
        """Raises GatewayError: 502 for an invalid or too large answer, 503 without memory."""
        run = self._run
        if self._events:
            self._take(self._events.feed(data))
            if self._events.held > run.format.max_event:
                raise run.too_large()
            self._events.charge()
        elif self._plain is not None:
            self._hold(self._plain, data)
        elif run.status != 200:
            run.body += data[: MAX_ERROR - len(run.body)]

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        if self._events:
            self._take(self._events.finish())
        elif self._plain is not None:
            self._run.plain_answer, self._plain = bytes(self._plain), None

    def cut(self) -> None:
        """The run has failed. Its events so far stay in its log."""
        if self._events:
            self._events.drop()
        self._plain = None

    def feed_from(self, answer: PausableSource | None) -> None:
        """Nothing pauses the replica, because a log drops its oldest events."""

    def _take(self, events: list[bytes]) -> None:
        for event in events:
            if data_of(event).lstrip().startswith(b"{"):
                self._run.take(event)

    def _hold(self, plain: bytearray, data: bytes) -> None:
        if len(plain) + len(data) > self._run.format.max_answer:
            raise self._run.too_large()
        self._lease.charge(len(data))
        plain += data

    def __repr__(self) -> str:
        return f"<RunReply {self._events or self._run.status!r}>"
