"""One generation of this process that belongs to a token. The log of a chat's stream has its usage: a follower that has not
asked for it gets the stream without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import ApiRequest
from gateway.errors import GatewayError
from gateway.features.runs.detached_answer import DetachedAnswer
from gateway.features.runs.event_log import Logs
from gateway.request.client import ClientRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.features.prompt_log.kept_turn import KeptTurn
    from gateway.features.prompt_log.once.store import TokenKey


class OnceRun(DetachedAnswer):
    """A generation of a token.

    id: of the generation, its runner in the store. stream: it was asked for as a stream. ref: moves with its turn; "": none.
    expect: the chain that its client has computed; None: none. claimed: its token is its own, or not; an error: it cannot be.
    turn: its turn in the log. mark: of its token, when the turn is stored. ended: set at the end.
    """

    def __init__(
        self, key: TokenKey, id_: str, digest: str, logs: Logs, lease: MemoryLease, clock: Callable[[], float], *, stream: bool
    ) -> None:
        """lease: of its log. clock: seconds, the same as in `Logs.expire`."""
        super().__init__((key[0], id_), logs, lease, clock)
        self.key = key
        self.id = id_
        self.digest = digest
        self.stream = stream
        self.ref = ""
        self.expect: bytes | None = None
        self.api: ApiRequest | None = None
        self.request: ClientRequest | None = None
        self.task: asyncio.Task[None] | None = None
        self.claimed: asyncio.Future[bool | GatewayError] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.started = self.settling = False
        self.turn: KeptTurn | None = None
        self.mark: Callable[[Connection, str], None] | None = None

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
        return self.finished and not (self.complete and self.status == 200 and answered)

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

    def stop(self, reason: GatewayError) -> None:
        """Ends it without an answer, unless it ends already."""
        if not self.settling:
            self.stopped = self.stopped or reason
            if self.task is not None and self.started:
                self.task.cancel()
