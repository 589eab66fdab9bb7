"""One run: the events of its reply so far, and the reason if it has no answer.

events of the replica ──► take ──► numbered, in its log         the last one goes out only when the response is kept
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError
from gateway.features.histories.histories import Turn
from gateway.features.histories.records import IN_PROGRESS, Item, RunEnd, StoredResponse
from gateway.features.runs.event_log import EventLog, Key, Logs
from gateway.features.runs.run_format import EventKind, RunFailure, RunFormat

if TYPE_CHECKING:
    from gateway.features.runs.stored_runs import RunStore

    Opened = Callable[[], Awaitable[RunStore]]
    """Opens the store of runs. Raises StoreFailed."""


class Run:
    """One response that no client waits for.

    key: owner and id. client: the address of its client. response: its object until it has ended. turn: its turn,
    once it runs. progressed: set once a replica answers. told: its last event is in its log. task: runs it.
    body: of an error; whole: a plain answer that is not stored yet.
    """

    def __init__(
        self, stored: StoredResponse, client: str, format_: RunFormat, opened: Opened, logs: Logs, lease: MemoryLease
    ) -> None:
        """stored: as queued. lease: for its events."""
        self.key: Key = (stored.owner, stored.id)
        self.client = client
        self.created_at = int(stored.created_at)
        self.response = stored.response
        self.format = format_
        self.log: EventLog = logs.open(self.key, lease)
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self.begun = self.stopped = self.settling = self.told = False
        self.progressed = asyncio.Event()
        self.status = 0
        self.body = b""
        self.whole = b""
        self.failure: RunFailure | None = None
        self._opened = opened
        self._logs = logs

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def keeping(self) -> bool:
        """Whether storing its answer has begun."""
        return self.turn is not None and self.turn.keeping

    def join(self, turn: Turn) -> None:
        """Take its turn in its history, which is part of its request now."""
        turn.told.id, turn.told.created_at = self.id, self.created_at
        turn.finish, self.turn = self.finish, turn

    async def finish(self, end: RunEnd, items: Sequence[Item] = (), conversation: str = "") -> bool:
        """Store its end (`RunStore.finish`)."""
        return await (await self._opened()).finish(*self.key, end, items, conversation)

    def stop(self, reason: str) -> None:
        """Cancel its request, unless that has ended. Its end is stored all the same."""
        if self.task and self.begun and not self.settling:
            self.task.cancel(reason)

    def say(self, status: str) -> None:
        """Add an event with the object in its current state."""
        self._logs.add(self.log, self.format.event(status, self.log.next, self.response))

    def say_last(self, event: bytes) -> None:
        self.told = True
        self._logs.add(self.log, event)

    def progress(self) -> None:
        """Change the state: a replica answers. Idempotent."""
        if not self.progressed.is_set():
            self.response = self.format.in_state(self.response, IN_PROGRESS)
            self.progressed.set()
            self.say(IN_PROGRESS)

    def take(self, event: bytes) -> None:
        """Take an event of the replica. Raises GatewayError 502."""
        kind = self.format.kind(event)
        if kind is EventKind.IGNORED or self.told:
            return
        if kind is EventKind.FAILURE:
            self.failure = self.format.failure(event)
            return
        last = kind is EventKind.LAST
        if last and not self.keeping:
            raise self.too_large()
        if last and not (self.turn and self.turn.stored):
            return
        self._logs.add(self.log, self.format.numbered(event, self.log.next, self.id))
        self.told = last

    async def keep_whole(self) -> None:
        """Store a plain answer that was too large to be stored during delivery."""
        whole, self.whole = self.whole, b""
        if whole and self.turn and not self.turn.keeping:
            await self.turn.keep(whole)

    def reason(self) -> RunFailure:
        """The reason for which it has no answer."""
        if self.failure is not None:
            return self.failure
        if self.status >= 400:
            message, code = _said(self.body)
            return RunFailure(self.status, message or f"The replica answered {self.status}.", code)
        if self.keeping:
            text = "The answer could not be kept: it is too large, is no response, or its conversation is gone."
            return RunFailure(500, f"{text} {self.format.advice}")
        return RunFailure(502, "The replica's answer was not complete. Ask again.")

    def too_large(self) -> GatewayError:
        """The error for an answer that is too large to be stored, so that no client could ever read it."""
        what = f"The answer has more than {self.format.most:,} bytes, or too many values: more than is kept of a response."
        return GatewayError(502, "answer_too_large", f"{what} {self.format.advice}")

    def __repr__(self) -> str:
        state = "settling" if self.settling else "stopped" if self.stopped else "running" if self.begun else "new"
        return f"<Run {self.id}, {state}, {self.log!r}>"


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
