"""A run in the background as a request of the gateway, and its reply, which no client reads: events for the run's log.

    the replica's stream ──► RunReply ──► whole events, numbered ──► Run.say ──► its log
    an error, or an answer that is no stream ──► Run.error: why there is no answer

The last event goes out only when the response is kept. Where it is not, or the answer is no stream, `runs.py` says it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

import orjson

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.named import ERRORS, name_of
from gateway.dialects.responses.background.events import COMPLETE, Failure, Splitter, event_of, numbered
from gateway.dialects.responses.background.objects import IN_PROGRESS, error_in, in_state
from gateway.dialects.responses.stream import QUIET
from gateway.errors import over_budget
from gateway.request.background.event_log import EventLog, Key, Logs
from gateway.request.client import REQUEST_ID_HEADER, Caller, ClientReply, ClientRequest, Headers
from gateway.state.histories import Turn
from gateway.upstream.client import Source

MAX_ERROR: Final = 64 << 10  # bytes of an answer that is no stream
UNCHARGED: Final = 64 << 10  # bytes of an event that is not whole

_STREAM: Final = re.compile(rb"(?:^|\r\n)content-type: ?text/event-stream", re.IGNORECASE)


class Run:
    """One response that is made in the background.

    key: owner and id. response: the object as long as it has not ended. turn: its part in its history, once a replica is
    asked. progressed: set once a replica answers. told: its last event went out. task: once it runs.
    """

    def __init__(self, key: Key, created_at: int, response: bytes, logs: Logs, lease: MemoryLease) -> None:
        """lease: for its events."""
        self.key = key
        self.created_at = created_at
        self.response = response
        self.log: EventLog = logs.open(key, lease)
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self.begun = self.stopped = self.settling = self.told = False
        self.progressed = asyncio.Event()
        self.status = 0
        self.body = b""  # of an answer that is no stream
        self.failure: Failure | None = None
        self._logs = logs

    @property
    def id(self) -> str:
        return self.key[1]

    def join(self, turn: Turn) -> None:
        """Its history was written out."""
        turn.told.id, turn.told.created_at = self.id, self.created_at
        self.turn = turn

    def say(self, kind: str) -> None:
        """An event with the object as it is."""
        self._logs.add(self.log, event_of(kind, self.log.next, self.response))

    def say_last(self, event: bytes) -> None:
        self.told = True
        self._logs.add(self.log, event)

    def progress(self) -> None:
        """A replica answers. Idempotent."""
        if not self.progressed.is_set():
            self.response = in_state(self.response, IN_PROGRESS)
            self.progressed.set()
            self.say("response.in_progress")

    def take(self, event: bytes) -> None:
        """An event of the replica's. Raises GatewayError 502."""
        name = name_of(event)
        if name in QUIET or self.told:
            return
        if name in ERRORS:
            self.failure = Failure(event)
            return
        last = name in COMPLETE
        if last and not (self.turn and self.turn.stored):
            return
        self._logs.add(self.log, numbered(event, self.log.next, self.id))
        self.told = last

    def error(self) -> dict[str, str]:
        """Why it has no answer."""
        if self.failure:
            return error_in(502, self.failure.message, self.failure.code)
        if self.status >= 400:
            message, code = _said(self.body)
            return error_in(self.status, message or f"The replica answered {self.status}.", code)
        if self.turn and self.turn.keeping:
            return error_in(500, "The answer could not be kept: it is too large, or its conversation is gone.")
        return error_in(502, "The replica's answer was not complete, or too large for a run in the background.")

    def __repr__(self) -> str:
        state = "settling" if self.settling else "stopped" if self.stopped else "running" if self.begun else "new"
        return f"<Run {self.id}, {state}, {self.log!r}>"


class RunHeaders:
    """Those of the request that has asked for it; the id of the response stands for that of the request."""

    def __init__(self, asked: Headers, id_: str) -> None:
        self._asked = asked
        self._id = id_

    def get(self, name: str, /) -> str | None:
        return self._id if name == REQUEST_ID_HEADER else self._asked.get(name)


class RunRequest(ClientRequest):
    """See the top of this file. `close` it."""

    def __init__(self, asked: ClientRequest, caller: Caller, run: Run, body: bytes, lease: MemoryLease) -> None:
        """asked: the request that has asked for it. lease: of its own, with the body charged."""
        super().__init__("POST", asked.path, asked.target, RunHeaders(asked.headers, run.id), lease)
        self.any_form = True
        self.run = run
        self._caller = caller
        self._lines = asked.upstream_headers()
        self._body = body

    def caller(self) -> Caller:
        return self._caller

    def upstream_headers(self) -> bytes:
        return self._lines

    @property
    def here(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return True

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        return RunReply(self.run, self.lease)

    def close(self) -> None:
        """Idempotent."""
        self._body = b""
        self.lease.close()

    def __repr__(self) -> str:
        return f"<RunRequest {self.run!r}>"


class RunReply(ClientReply):
    """See the top of this file. The lease is charged with an event that is not whole, beyond UNCHARGED."""

    def __init__(self, run: Run, lease: MemoryLease) -> None:
        super().__init__()
        self.keep_alive = True
        self._run = run
        self._lease = lease
        self._splitter: Splitter | None = None
        self._charged = 0

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun = True
        run = self._run
        run.status, run.body = status, b""
        if status == 200:
            run.progress()
            if _STREAM.search(headers):
                self._splitter = Splitter()
        self.write(first)

    def write(self, data: bytes) -> None:
        if self._splitter:
            self._pass(self._splitter, data)
        else:
            self._run.body += data[: MAX_ERROR - len(self._run.body)]

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        if self._splitter and self._splitter.held:
            self._pass(self._splitter, b"\n\n")

    def cut(self) -> None:
        """What has come stays; the run has failed."""
        if self._splitter:
            self._splitter.drop()

    def feed_from(self, answer: Source | None) -> None:
        """Nobody holds it back: a log drops what is old."""

    def _pass(self, splitter: Splitter, data: bytes) -> None:
        for event in splitter.feed(data):
            self._run.take(event)
        more = max(0, splitter.held - UNCHARGED) - self._charged
        if more > 0 and not self._lease.grow(more):
            splitter.drop()
            raise over_budget(0, self._lease.account.largest)
        if more < 0:
            self._lease.shrink(-more)
        self._charged += more

    def __repr__(self) -> str:
        return f"<RunReply {self._splitter!r}>"


def _said(body: bytes) -> tuple[str, object]:
    """Message and code of an error's body."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", None
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        return "", None
    message = error.get("message")
    return message if isinstance(message, str) else "", error.get("code")
