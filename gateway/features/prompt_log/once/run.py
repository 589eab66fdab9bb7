"""One generation of this process: its request, and its reply, which followers read from a log.

OnceRequest ── lifecycle of any request ──► OnceReply ──► OnceRun: head, then pieces in its log ──► its followers
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import ApiRequest
from gateway.errors import GatewayError
from gateway.features.runs.event_log import MAX_LOG, EventLog, Logs
from gateway.request.client import Caller, ClientReply, ClientRequest, InternalRequest
from gateway.request.whole_events import WholeEvents
from gateway.upstream.client import PausableSource

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.features.prompt_log.kept_turn import KeptTurn
    from gateway.features.prompt_log.once.store import TokenKey

_STREAM: Final = re.compile(rb"(?:^|\r\n)content-type: ?text/event-stream", re.IGNORECASE)


class OnceRun:
    """A generation.

    id: of the generation, its runner in the store. stream: it was asked for as a stream. claimed: its token is its own, or not;
    an error: it cannot be. begun: set when the head of its answer is known, or it has ended. status, lines: of the head; 0:
    there is none. streams: it is of a stream. complete: nothing of the answer is missing. turn: its turn in the log. mark: of
    its token, when the turn is stored. stopped: the reason, if it was stopped. ended: set at the end.
    """

    def __init__(
        self, key: TokenKey, id_: str, digest: str, logs: Logs, lease: MemoryLease, clock: Callable[[], float], *, stream: bool
    ) -> None:
        """lease: of its log. clock: seconds, the same as in `Logs.expire`."""
        self.key = key
        self.id = id_
        self.digest = digest
        self.stream = stream
        self.log: EventLog = logs.open(self.log_key, lease)
        self.api: ApiRequest | None = None
        self.request: OnceRequest | None = None
        self.task: asyncio.Task[None] | None = None
        self.claimed: asyncio.Future[bool | GatewayError] = asyncio.get_running_loop().create_future()
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.status, self.lines = 0, b""
        self.complete = self.streams = self.started = self.settling = False
        self.stopped: GatewayError | None = None
        self.turn: KeptTurn | None = None
        self.mark: Callable[[Connection, str], None] | None = None
        self._logs = logs
        self._clock = clock
        self._finished = False

    @property
    def log_key(self) -> tuple[str, str]:
        return self.key[0], self.id

    @property
    def kept(self) -> bool:
        """True if its turn is durable: then its token has ended with it."""
        return self.turn is not None and self.turn.expires_at is not None

    @property
    def held(self) -> bool:
        """True if its whole answer is in the log."""
        return self.complete and self.status == 200 and self.log.first == 0 and self.log.size > 0

    def join(self, turn: KeptTurn) -> None:
        """Attaches the turn of its request: its token ends in the transaction that stores the turn."""
        self.turn, turn.also = turn, self.mark

    def add(self, data: bytes) -> None:
        if data:
            self._logs.add(self.log, data)

    def finish(self, *, complete: bool) -> None:
        """Nothing follows in the log. Idempotent."""
        if not self._finished:
            self._finished, self.complete = True, complete
            self._logs.end(self.log_key, self._clock())
        self.begun.set()

    def stop(self, reason: GatewayError) -> None:
        """Ends it without an answer, unless it ends already."""
        if not self.settling:
            self.stopped = self.stopped or reason
            if self.task is not None and self.started:
                self.task.cancel()

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "stopped" if self.stopped else "running"
        return f"<OnceRun {self.id}, {state}, {self.log!r}>"


class OnceRequest(InternalRequest):
    """The request of a generation, with the headers of the request that began it. To be closed."""

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
        run.status, run.lines = status, headers
        if _STREAM.search(headers):
            self._events, run.streams = WholeEvents(self._lease), True
        run.begun.set()
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
