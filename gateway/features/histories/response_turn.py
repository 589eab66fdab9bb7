"""The turn of one request of Responses in a history, through which its answer passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from gateway.dialects.dialect import StreamReader
from gateway.features.histories.history import History
from gateway.features.histories.kept import ClientHistory, KeptReader
from gateway.features.histories.log_turn import LogTurn
from gateway.features.histories.records import Item, RunEnd
from gateway.request.exchange import AnswerTap

Finish = Callable[[RunEnd, Sequence[Item], str], Awaitable[bool]]
"""(end, items for the conversation, its id) -> False: the run had already ended. Raises StoreError."""
Keep = Callable[[str, "Turn", bytes], Awaitable[bool]]
"""(owner, turn, the replica's object) -> True: it is durable."""


class Turn(AnswerTap):
    """The turn of one request in a history.

    keep: stores an answer (`Histories.keep`). before: earlier items, the oldest first, as pieces to join by commas.
    client_history: how the answer is edited for the client. request_items: its input; None: the answer is not stored. parent:
    the previous stored response, or "". remember: called with the complete answer of a stream that is not stored, for the
    client's connection. attempted: `keep` was called. stored: the answer is in the store. client: the unit of fairness. finish:
    stores the answer of a background run, whose response is already stored; None: not a run. unwritten: the arguments of
    `finish`, until it has succeeded. log: the turn in a prompt log, or None. issuers: the pools that have made sealed parts of
    the log whose head the request names.
    """

    __slots__ = (
        "_keep",
        "_owner",
        "attempted",
        "before",
        "client",
        "client_history",
        "finish",
        "issuers",
        "log",
        "parent",
        "remember",
        "request_items",
        "stored",
        "unwritten",
    )

    def __init__(self, keep: Keep, owner: str, history: History, before: list[bytes]) -> None:
        self._keep = keep
        self._owner = owner
        self.before = before
        self.client_history = ClientHistory(history.previous, history.conversation, store=history.store)
        self.request_items: bytes | None = history.own if history.store else None
        self.parent = history.previous
        self.client = ""
        self.remember: Callable[[bytes], None] | None = None
        self.attempted = self.stored = False
        self.finish: Finish | None = None
        self.unwritten: tuple[RunEnd, list[Item]] | None = None
        self.log: LogTurn | None = None
        self.issuers: frozenset[str] = frozenset()

    def disable(self) -> None:
        """Store nothing of this answer, and leave the client's `store` to the replica."""
        self.client_history.store, self.request_items = None, None

    def reader(self, inner: StreamReader) -> KeptReader:
        """Make the reader that extracts the answer from its stream. It holds back the end of an answer to store, until
        `ended`.
        """
        return KeptReader(inner, self.client_history, None if self.request_items is not None else self.remember)

    async def ended(self, reader: StreamReader) -> bytes:
        """Store a stream's answer. Returns the end that was held back."""
        assert isinstance(reader, KeptReader)
        stored = await self.keep(reader.response)
        if not stored and self.remember:
            self.remember(reader.response)
        return reader.ending(stored=stored)

    async def keep(self, response: bytes) -> bool:
        """Store an answer; True: it is durable. response: the replica's object (JSON). Raises nothing."""
        self.attempted = True
        self.stored = await self._keep(self._owner, self, response)
        return self.stored

    async def whole(self, body: bytes) -> bytes:
        """Store an answer that is not a stream. Returns the client's answer; other bodies are returned unchanged."""
        stored = await self.keep(body)
        try:
            return self.client_history.edited(body, stored=stored)
        except (ValueError, IndexError):
            return body

    def __repr__(self) -> str:
        return f"<Turn after {len(self.before)} pieces>"
