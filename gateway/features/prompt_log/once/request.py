"""The request of a generation, and its reply, which followers read.

OnceRequest ── lifecycle of any request ──► OnceReply ──► OnceRun: head, then pieces in its log ──► its followers
"""

from __future__ import annotations

from functools import partial

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError
from gateway.features.prompt_log.once.run import OnceRun
from gateway.features.runs.event_log import MAX_LOG
from gateway.request.client import Caller, ClientReply, ClientRequest, InternalRequest
from gateway.request.whole_events import WholeEvents
from gateway.upstream.client import PausableSource


class OnceRequest(InternalRequest):
    """The request of a generation, with the headers of the request that began it. To be closed."""

    pulses = True  # they reach its followers through the log

    def __init__(self, asked: ClientRequest, run: OnceRun, lease: MemoryLease) -> None:
        """lease: with its body charged."""
        super().__init__(asked, run.id, partial(OnceReply, run, lease), lease)
        self.run = run
        self._caller = asked.caller()

    def caller(self) -> Caller:
        return self._caller

    @property
    def cancelled(self) -> bool:
        return self.run.stopped is not None

    def __repr__(self) -> str:
        return f"<OnceRequest of {self.run!r}>"


class OnceReply(ClientReply):
    """Writes the answer into the log of a generation: streams in whole events. Nothing pauses the replica."""

    def __init__(self, run: OnceRun, lease: MemoryLease) -> None:
        super().__init__()
        self.keep_alive = True
        self._run = run
        self._lease = lease
        self._events: WholeEvents | None = None
        self._late = False  # another answer has begun before

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun = True
        run = self._run
        self._late = run.begun.is_set()
        if self._late:
            return
        run.begin(status, headers)
        if run.streams:
            self._events = WholeEvents(self._lease)
        self.write(first)
        if length is not None and length == len(first):
            run.finish(complete=True)

    def write(self, data: bytes) -> None:
        """Raises GatewayError 413 or 503 without memory for an incomplete event."""
        if self._late or not data:
            return
        if self._events is None:
            self._run.add(data)
            return
        self._run.add(b"".join(self._events.feed(data)))
        if self._events.held > MAX_LOG:
            raise GatewayError(502, "replica_failed", "The replica has sent an event that is too large.")
        self._events.charge()

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        if self._late:
            return
        if self._events is not None:
            self._run.add(b"".join(self._events.finish()))
        self._run.finish(complete=True)

    def cut(self) -> None:
        """The answer is not complete. Its whole events stay in the log."""
        if self._events is not None:
            self._events.drop()
        if not self._late:
            self._run.finish(complete=False)

    def feed_from(self, answer: PausableSource | None) -> None:
        """The log drops its oldest pieces instead."""

    def __repr__(self) -> str:
        return f"<OnceReply of {self._run!r}>"
