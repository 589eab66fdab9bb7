"""One run in the background: what its reply has told of it so far, and why it has no answer, if it has none.

events of the replica ──► take ──► numbered, in its log         the last one goes out only when the response is kept
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from gateway.admission.memory import MemoryLease
from gateway.dialects.events.named import ERRORS, name_of
from gateway.dialects.responses.kept import MAX_KEPT
from gateway.dialects.responses.stream import QUIET
from gateway.errors import GatewayError
from gateway.features.histories.histories import Turn
from gateway.features.responses.background.events import COMPLETE, Failure, event_of, numbered
from gateway.features.responses.background.objects import IN_PROGRESS, error_in, in_state
from gateway.features.runs.event_log import EventLog, Key, Logs

_LESS: Final = "Ask for less of it (max_output_tokens), or without 'background'."


class Run:
    """One response that is made in the background.

    key: owner and id. client: the address that has asked for it. response: the object as long as it has not ended. turn: its
    part in its history, once a replica is asked. progressed: set once a replica answers. told: its last event went out. task:
    once it runs. body: of an error; whole: of a plain answer that is not kept yet.
    """

    def __init__(self, key: Key, client: str, created_at: int, response: bytes, logs: Logs, lease: MemoryLease) -> None:
        """lease: for its events."""
        self.key = key
        self.client = client
        self.created_at = created_at
        self.response = response
        self.log: EventLog = logs.open(key, lease)
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self.begun = self.stopped = self.settling = self.told = False
        self.progressed = asyncio.Event()
        self.status = 0
        self.body = b""
        self.whole = b""
        self.failure: Failure | None = None
        self._logs = logs

    @property
    def id(self) -> str:
        return self.key[1]

    @property
    def keeping(self) -> bool:
        """Whether its answer was given to the store."""
        return self.turn is not None and self.turn.keeping

    def join(self, turn: Turn) -> None:
        """Its history was written out."""
        turn.told.id, turn.told.created_at = self.id, self.created_at
        self.turn = turn

    def stop(self, reason: str) -> None:
        """End its request, unless that has ended. It settles all the same."""
        if self.task and self.begun and not self.settling:
            self.task.cancel(reason)

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
        if last and not self.keeping:
            raise answer_too_large()
        if last and not (self.turn and self.turn.stored):
            return
        self._logs.add(self.log, numbered(event, self.log.next, self.id))
        self.told = last

    async def keep_whole(self) -> None:
        """Keep a plain answer that was too large to be kept while it was delivered."""
        whole, self.whole = self.whole, b""
        if whole and self.turn and not self.turn.keeping:
            await self.turn.keep(whole)

    def error(self) -> dict[str, str]:
        """Why it has no answer."""
        if self.failure:
            return error_in(502, self.failure.message, self.failure.code)
        if self.status >= 400:
            message, code = _said(self.body)
            return error_in(self.status, message or f"The replica answered {self.status}.", code)
        if self.keeping:
            text = f"The answer could not be kept: it is too large, is no response, or its conversation is gone. {_LESS}"
            return error_in(500, text)
        return error_in(502, "The replica's answer was not complete. Ask again.")

    def __repr__(self) -> str:
        state = "settling" if self.settling else "stopped" if self.stopped else "running" if self.begun else "new"
        return f"<Run {self.id}, {state}, {self.log!r}>"


def answer_too_large() -> GatewayError:
    """An answer of a run that is more than is kept, so that no client could ever read it."""
    text = f"The answer has more than {MAX_KEPT:,} bytes, or too many values: more than is kept of a response. {_LESS}"
    return GatewayError(502, "answer_too_large", text)


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
