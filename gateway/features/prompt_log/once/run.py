"""One generation of this process: the head of its answer, and a log of the pieces that its followers read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import ApiRequest
from gateway.errors import GatewayError
from gateway.features.runs.event_log import EventLog, Logs
from gateway.request.client import ClientRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.features.prompt_log.kept_turn import KeptTurn
    from gateway.features.prompt_log.once.store import TokenKey


class OnceRun:
    """A generation.

    id: of the generation, its runner in the store. stream: it was asked for as a stream. ref: moves with its turn; "": none.
    expect: the chain that its client has computed; None: none. claimed: its token is its own, or not; an error: it cannot be.
    begun: set when the head of its answer is known, or it has ended. status, lines: of the head; 0: there is none. streams: it
    is of a stream. complete: nothing of the answer is missing. turn: its turn in the log. mark: of its token, when the turn is
    stored. stopped: the reason, if it was stopped. ended: set at the end.
    """

    def __init__(
        self, key: TokenKey, id_: str, digest: str, logs: Logs, lease: MemoryLease, clock: Callable[[], float], *, stream: bool
    ) -> None:
        """lease: of its log. clock: seconds, the same as in `Logs.expire`."""
        self.key = key
        self.id = id_
        self.digest = digest
        self.stream = stream
        self.ref = ""
        self.expect: bytes | None = None
        self.log: EventLog = logs.open(self.log_key, lease)
        self.api: ApiRequest | None = None
        self.request: ClientRequest | None = None
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
    def failed(self) -> bool:
        """True if its answer is an error, or has broken off: its token is free as soon as it has ended. A stream that ends with
        an error event has no result of its turn.
        """
        answered = self.turn is not None and (self.turn.result != "" or not self.streams)
        return self._finished and not (self.complete and self.status == 200 and answered)

    @property
    def held(self) -> bool:
        """True if its whole answer is in the log. A stream that broke off has an end, and no turn; a large plain answer has no
        turn, either.
        """
        whole = self.complete and self.turn is not None and (self.turn.result != "" or not self.streams)
        return whole and self.status == 200 and self.log.first == 0 and self.log.size > 0

    def join(self, turn: KeptTurn) -> None:
        """Attaches the turn of its request: its token ends in the transaction that stores the turn."""
        self.turn, turn.also, turn.generation = turn, self.mark, self.id

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
