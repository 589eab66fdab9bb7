"""The turn of one request in a prompt log. The feature of prompt logs makes it; histories store it with the response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.database.failures import StoreFailed
from gateway.features.histories.records import RefMove, StoredResponse, TurnNames
from gateway.request.slots import Slot

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from gateway.features.histories.turns import TurnStore

    StoreWork = Callable[[Connection, str], None]

LATER_S: Final = 10.0  # for the store, when no answer waits


class LogTurn:
    """A turn after a base.

    parent: the id of the base; "": none. before: elements of the frame and of the base, as pieces to join by commas. own: the
    request's elements, as they are in its body; None: all of its elements. stored: the same, as they are stored. keeps: the
    turn is to be stored in any case. framed: the frame to be stored with it. ttl_s: its lifetime; 0: the longest. move: of a
    ref, to its head. request_id: of its request. expires_at: of the stored turn; None: it is not stored. also: further work in
    the transaction that stores it, with its id; then `put_later` tries to store it again, if the store was late or failed.
    """

    def __init__(
        self,
        parent: str,
        before: Sequence[bytes],
        own: bytes | None,
        stored: bytes,
        *,
        keeps: bool,
        framed: bytes = b"",
        ttl_s: float = 0.0,
    ) -> None:
        self.parent = parent
        self.before = list(before)
        self.own = own
        self.stored = stored
        self.keeps = keeps
        self.framed = framed
        self.ttl_s = ttl_s
        self.move: RefMove | None = None
        self.request_id = ""
        self.expires_at: float | None = None
        self.also: StoreWork | None = None
        self.put_later: Callable[[], Awaitable[float]] | None = None

    async def put(self, store: TurnStore, row: StoredResponse) -> None:
        """Stores the row of this turn, in time for its answer. Raises StoreError."""
        put = partial(store.put_turn, row, self.framed, self.ttl_s, self.move, self.also)
        try:
            self.ended("kept", await put())
        except StoreFailed:
            self.put_later = partial(put, late_s=LATER_S) if self.also is not None else None
            raise

    def named(self, output: bytes) -> TurnNames | None:
        """The names with this answer: items of a response, JSON joined by commas. None: it has no name."""
        raise NotImplementedError

    def ended(self, result: str, expires_at: float | None = None) -> None:
        """Takes the result: kept (until expires_at), failed, unfit or full."""
        raise NotImplementedError


LOG_TURN: Final = Slot[LogTurn]("histories.log_turn")
