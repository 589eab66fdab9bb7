"""One publisher, followed: its messages in order, and the blocks of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.features.kv_events import wire
from gateway.features.kv_events.holdings import Holdings
from gateway.features.kv_events.ordering import REST, MessageOrder
from gateway.features.kv_events.wire import CacheCleared

FULL: Final = "full"
FULL_S: Final = 600.0  # then an engine with too many blocks is followed again
SLOW_TIERS_S: Final = 3600.0  # blocks in slower memory are believed for so long, if their publisher reports no removals


class Source(NamedTuple):
    """A publisher of events. replica: its name. rank: of the data-parallel ranks of the replica. replay: its replay endpoint,
    "" without one. topic: of its messages. salted: its engine separates prefixes by cache salts.
    """

    replica: str
    rank: int
    endpoint: str
    replay: str
    topic: str
    salted: bool


class EventStream:
    """One followed publisher. Only the receiver's thread changes it (`receiver.py`). ask: requests a replay from a number on.
    lost: called when its engine has lost its cache.

    messages, blocks, dropped, refused: received messages, stored and removed blocks in them, events that do not count, and
    messages that are no batches, so far. full: it has stored more than there is room for.
    """

    def __init__(self, source: Source, ask: Callable[[int], None], lost: Callable[[Source], None]) -> None:
        self.source = source
        self.holdings = Holdings(salted=source.salted)
        self.ordering = MessageOrder(self, replays=bool(source.replay))
        self.messages = self.blocks = self.dropped = self.refused = 0
        self.full = False
        self._full_since = 0.0
        self._ask, self._lost = ask, lost

    @property
    def state(self) -> str:
        """That of its messages (`ordering.py`), or FULL."""
        return FULL if self.full else self.ordering.state

    @property
    def tells(self) -> bool:
        """True if it tells what its engine holds, or a part of that."""
        return self.state not in (FULL, REST) and bool(self.messages or self.holdings.complete)

    # -- calls of the ordering

    def apply(self, payload: bytes, now: float) -> None:
        """Take in a message."""
        self.messages += 1
        if self.full:
            return
        try:
            batch = wire.read(payload)
        except wire.WireError:
            self.refused += 1
            self.holdings.complete = False
            return
        self.dropped += batch.dropped
        for event in batch.events:
            self.holdings.apply(event, now)
            if isinstance(event, CacheCleared):
                self._lost(self.source)  # then its blocks are forgotten
            else:
                self.blocks += len(event.hashes)

    def forget(self, reason: str) -> None:
        """Forget everything: the engine may hold anything."""
        self.holdings.clear(complete=False)
        self.full = False
        if reason == "restart":
            self._lost(self.source)

    def known(self) -> None:
        """Everything that the engine holds is known from here on."""
        self.holdings.clear(complete=True)

    def ask(self, number: int) -> None:
        self._ask(number)

    # -- time and space

    def tick(self, now: float) -> None:
        """To be called every second or so."""
        if self.full and now - self._full_since > FULL_S:
            self.full = False
            self.ordering.start(now)
        self.ordering.tick(now)
        self.holdings.expire(now - SLOW_TIERS_S)

    def overflow(self, now: float) -> None:
        """There is no room for its blocks: none of them is believed for FULL_S, or until it restarts."""
        self.holdings.clear(complete=False)
        self.full, self._full_since = True, now

    def __repr__(self) -> str:
        return f"<EventStream of {self.source.replica}, {self.ordering!r}, {self.holdings!r}>"
