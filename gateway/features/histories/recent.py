"""The latest responses of WebSocket connections, in memory, so that a client can continue responses that are not stored.

    a response is complete ── remember ──► its whole history, one per lane of a connection ── find ──► the next message

A client with `store: false` sends only the new items and the id of the previous response. So the connection keeps the items of
its latest response, input and output, until a later response of that lane is complete or the connection ends. A failed response
replaces nothing, so the response before it can be continued again.

Bounds: the lanes of a connection; the bytes of one history; and the bytes of all histories of this process, a share of the
memory budget, so that idle connections leave the rest of the budget to requests. Beyond them the least recently used history is
dropped, of any connection. Each byte is charged to its client; a history that cannot be charged is not remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gateway.admission.memory import ClientAccount, MemoryLease

MAX_LANES: Final = 32  # per connection
MAX_HISTORY: Final = 16 << 20  # bytes
SHARE: Final = 0.25  # of a single client's limit in the memory budget


class RememberedResponse:
    """One response. items: its input and output, as JSON joined by commas."""

    __slots__ = ("connection", "id", "items", "lane", "lease")

    def __init__(self, connection: ConnectionResponses, lane: str, id_: str, items: bytes, lease: MemoryLease) -> None:
        self.connection = connection
        self.lane = lane
        self.id = id_
        self.items = items
        self.lease = lease


class RecentResponses:
    """The remembered responses of all connections of this process. held: bytes."""

    def __init__(self) -> None:
        self.held = 0
        self._by_last_use: OrderedDict[RememberedResponse, None] = OrderedDict()  # the least recently used first

    def add(self, entry: RememberedResponse, max_bytes: int) -> None:
        """Adds a response, and drops the least recently used ones beyond max_bytes in all. O(1) per response."""
        self._by_last_use[entry] = None
        self.held += len(entry.items)
        while self.held > max_bytes:
            oldest = next(iter(self._by_last_use))
            oldest.connection.drop(oldest.lane)

    def touch(self, entry: RememberedResponse) -> None:
        self._by_last_use.move_to_end(entry)

    def remove(self, entry: RememberedResponse) -> None:
        del self._by_last_use[entry]
        self.held -= len(entry.items)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.held == sum(len(entry.items) for entry in self._by_last_use)
        for entry in self._by_last_use:
            entry.connection.check(entry)

    def __repr__(self) -> str:
        return f"<RecentResponses {len(self._by_last_use)} histories, {self.held} bytes>"


class ConnectionResponses:
    """The remembered responses of one connection. To be closed."""

    def __init__(self, recent: RecentResponses, account: ClientAccount) -> None:
        self._recent = recent
        self._account = account
        self._lanes: OrderedDict[str, RememberedResponse] = OrderedDict()  # in the order of their responses
        self._closed = False

    def find(self, id_: str) -> bytes | None:
        """The history of a response, or None. O(lanes)."""
        for entry in self._lanes.values():
            if entry.id == id_:
                self._recent.touch(entry)
                return entry.items
        return None

    def remember(self, lane: str, id_: str, items: bytes) -> None:
        """Replaces the response of a lane. A response that is too large is not remembered."""
        self.drop(lane)
        size = len(items)
        if self._closed or size > self.largest or not self._account.grants(size):
            return
        while len(self._lanes) >= MAX_LANES:
            self.drop(next(iter(self._lanes)))
        lease = self._account.lease()
        lease.grow(size)
        entry = self._lanes[lane] = RememberedResponse(self, lane, id_, items, lease)
        self._recent.add(entry, self._max_bytes)

    @property
    def largest(self) -> int:
        """The largest history that can be remembered, in bytes."""
        return min(MAX_HISTORY, self._max_bytes)

    @property
    def _max_bytes(self) -> int:
        """The limit for all connections."""
        return int(self._account.largest * SHARE)

    def drop(self, lane: str) -> None:
        """Idempotent."""
        entry = self._lanes.pop(lane, None)
        if entry is not None:
            entry.lease.close()
            self._recent.remove(entry)

    def close(self) -> None:
        """Drops all responses, because the connection has ended. Idempotent."""
        self._closed = True
        for lane in list(self._lanes):
            self.drop(lane)

    def check(self, entry: RememberedResponse) -> None:
        """Raises AssertionError if a response is not registered with its lane."""
        assert self._lanes[entry.lane] is entry
        assert entry.lease.held == len(entry.items) <= MAX_HISTORY
        assert len(self._lanes) <= MAX_LANES

    def __repr__(self) -> str:
        return f"<ConnectionResponses {[entry.id for entry in self._lanes.values()]}>"


class Lane:
    """Access of one message to the responses of its connection. warms: the client receives no output."""

    __slots__ = ("_connection", "_lane", "warms")

    def __init__(self, connection: ConnectionResponses, lane: str, *, warms: bool) -> None:
        self._connection = connection
        self._lane = lane
        self.warms = warms

    @property
    def largest(self) -> int:
        """The largest history that can be remembered, in bytes."""
        return self._connection.largest

    def find(self, id_: str) -> bytes | None:
        """The history of a response of any lane, or None."""
        return self._connection.find(id_)

    def remember(self, id_: str, items: bytes) -> None:
        """Replaces the response of this lane."""
        self._connection.remember(self._lane, id_, items)

    def __repr__(self) -> str:
        return f"<Lane {self._lane or '-'} of {self._connection!r}>"
