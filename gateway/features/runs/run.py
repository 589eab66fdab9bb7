"""One run: the events of its reply so far, and its failure if it has no answer.

events of the replica ──► take ──► numbered, in its log the last event is sent only when the response is stored
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError
from gateway.features.histories.records import IN_PROGRESS, Item, RunEnd, StoredResponse
from gateway.features.histories.response_turn import Turn
from gateway.features.runs.event_log import EventLog, Key, Logs
from gateway.features.runs.run_format import EventKind, RunFailure, RunFormat

if TYPE_CHECKING:
    from gateway.features.runs.stored_runs import RunStore

    OpenStore = Callable[[], Awaitable[RunStore]]
    """Opens the store of runs. Raises StoreFailed."""


class Run:
    """A response that runs without a client connection.

    key: owner and id. client: the address of its client. response: its object until it has ended. turn: its turn in the
    history, once its request is served. progressed: set when a replica answers. end_sent: the last event is in the log. task:
    serves the request. body: of an error. plain_answer: an answer that is not a stream and not stored yet.
    """

    def __init__(
        self, stored: StoredResponse, client: str, format_: RunFormat, open_store: OpenStore, logs: Logs, lease: MemoryLease
    ) -> None:
        """stored: the queued response. lease: for its events."""
        self.key: Key = (stored.owner, stored.id)
        self.client = client
        self.created_at = int(stored.created_at)
        self.response = stored.response
        self.format = format_
        self.log: EventLog = logs.open(self.key, lease)
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self.started = self.stopped = self.settling = self.end_sent = False
        self.progressed = asyncio.Event()
        self.status = 0
        self.body = b""
        self.plain_answer = b""
        self.failure: RunFailure | None = None
        self._open_store = open_store
        self._logs = logs

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def storing(self) -> bool:
        """True if storing of its answer has begun."""
        return self.turn is not None and self.turn.attempted

    def join(self, turn: Turn) -> None:
        """Attaches the turn of its request in its history."""
        turn.client_history.id, turn.client_history.created_at = self.id, self.created_at
        turn.finish, self.turn = self.finish, turn

    async def finish(self, end: RunEnd, items: Sequence[Item] = (), conversation: str = "") -> bool:
        """Stores its end (`RunStore.finish`)."""
        return await (await self._open_store()).finish(*self.key, end, items, conversation)

    def stop(self, reason: str) -> None:
        """Cancels its request, unless that has ended. The end is stored in any case."""
        if self.task and self.started and not self.settling:
            self.task.cancel(reason)

    def add_event(self, status: str) -> None:
        """Adds an event with the object in its current state."""
        self._logs.add(self.log, self.format.event(status, self.log.next, self.response))

    def add_last_event(self, event: bytes) -> None:
        self.end_sent = True
        self._logs.add(self.log, event)

    def progress(self) -> None:
        """Changes the status to in progress, because a replica answers. Idempotent."""
        if not self.progressed.is_set():
            self.response = self.format.in_state(self.response, IN_PROGRESS)
            self.progressed.set()
            self.add_event(IN_PROGRESS)

    def take(self, event: bytes) -> None:
        """Adds an event of the replica. Raises GatewayError 502."""
        kind = self.format.kind(event)
        if kind is EventKind.IGNORED or self.end_sent:
            return
        if kind is EventKind.FAILURE:
            self.failure = self.format.failure(event)
            return
        last = kind is EventKind.LAST
        if last and not self.storing:
            raise self.too_large()
        if last and not (self.turn and self.turn.stored):
            return
        self._logs.add(self.log, self.format.numbered(event, self.log.next, self.id))
        self.end_sent = last

    async def store_plain_answer(self) -> None:
        """Stores a plain answer that was too large to be stored during delivery."""
        plain_answer, self.plain_answer = self.plain_answer, b""
        if plain_answer and self.turn and not self.turn.attempted:
            await self.turn.keep(plain_answer)

    def reason(self) -> RunFailure:
        """The reason why it has no answer."""
        if self.failure is not None:
            return self.failure
        if self.status >= 400:
            message, code = _error_of(self.body)
            return RunFailure(self.status, message or f"The replica answered {self.status}.", code)
        if self.storing:
            text = "The answer could not be stored: it is too large, is not a response, or its conversation was deleted."
            return RunFailure(500, f"{text} {self.format.advice}")
        return RunFailure(502, "The replica's answer was not complete. Ask again.")

    def too_large(self) -> GatewayError:
        """The error for an answer that is too large to be stored."""
        text = f"The answer has more than {self.format.max_answer:,} bytes, or too many values, and cannot be stored."
        return GatewayError(502, "answer_too_large", f"{text} {self.format.advice}")

    def __repr__(self) -> str:
        state = "settling" if self.settling else "stopped" if self.stopped else "running" if self.started else "new"
        return f"<Run {self.id}, {state}, {self.log!r}>"


def _error_of(body: bytes) -> tuple[str, object]:
    """Message and code in the body of an error."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", None
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        return "", None
    message = error.get("message")
    return message if isinstance(message, str) else "", error.get("code")
