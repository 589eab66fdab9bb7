"""The newest responses of WebSocket connections, in memory: what a client goes on with although nothing keeps it.

    a response is complete ── remember ──► its whole history, one for each lane of a connection ── find ──► the next message

A client with `store: false` sends on its connection what is new, and the id of the response before. So the connection has the
items of its newest response, input and output, and drops them when a newer one of that lane is complete, or the connection
ends. A response that fails replaces nothing: what was before it can be continued again.

Bounds: the lanes of a connection; the bytes of one history; and those of all histories of this process, a share of the memory
budget, so that idle connections leave the rest of it to requests. Beyond them the history that was not used for the longest
time is dropped, whoever has it. Each byte is charged to its client; a history that may not be charged is not remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gateway.admission.memory import ClientAccount, MemoryLease

MAX_LANES: Final = 32  # of a connection
MAX_HISTORY: Final = 16 << 20  # bytes of one
SHARE: Final = 0.25  # of what a single client can hold of the memory budget


class Entry:
    """One response. items: of its input and its output, JSON, joined by commas."""

    __slots__ = ("id", "items", "lane", "lease", "newest")

    def __init__(self, newest: NewestResponses, lane: str, id_: str, items: bytes, lease: MemoryLease) -> None:
        self.newest = newest
        self.lane = lane
        self.id = id_
        self.items = items
        self.lease = lease


class RecentResponses:
    """Of all connections of this process. held: bytes."""

    def __init__(self) -> None:
        self.held = 0
        self._by_use: OrderedDict[Entry, None] = OrderedDict()  # the one that was not used for the longest time is first

    def add(self, entry: Entry, most: int) -> None:
        """most: bytes of all. O(1), and what has to go."""
        self._by_use[entry] = None
        self.held += len(entry.items)
        while self.held > most:
            oldest = next(iter(self._by_use))
            oldest.newest.drop(oldest.lane)

    def used(self, entry: Entry) -> None:
        self._by_use.move_to_end(entry)

    def remove(self, entry: Entry) -> None:
        del self._by_use[entry]
        self.held -= len(entry.items)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.held == sum(len(entry.items) for entry in self._by_use)
        for entry in self._by_use:
            entry.newest.check(entry)

    def __repr__(self) -> str:
        return f"<RecentResponses {len(self._by_use)} histories, {self.held} bytes>"


class NewestResponses:
    """Of one connection. `close` it."""

    def __init__(self, recent: RecentResponses, account: ClientAccount) -> None:
        self._recent = recent
        self._account = account
        self._lanes: OrderedDict[str, Entry] = OrderedDict()  # by the order of their responses
        self._closed = False

    def find(self, id_: str) -> bytes | None:
        """The history of a response. O(lanes)."""
        for entry in self._lanes.values():
            if entry.id == id_:
                self._recent.used(entry)
                return entry.items
        return None

    def remember(self, lane: str, id_: str, items: bytes) -> None:
        """The newest response of a lane, in the place of the one before; nothing if it is too large."""
        self.drop(lane)
        size = len(items)
        if self._closed or size > self.largest or not self._account.grants(size):
            return
        while len(self._lanes) >= MAX_LANES:
            self.drop(next(iter(self._lanes)))
        lease = self._account.lease()
        lease.grow(size)
        entry = self._lanes[lane] = Entry(self, lane, id_, items, lease)
        self._recent.add(entry, self._most)

    @property
    def largest(self) -> int:
        """Bytes of a history that may be remembered."""
        return min(MAX_HISTORY, self._most)

    @property
    def _most(self) -> int:
        """Bytes of all, of all connections."""
        return int(self._account.largest * SHARE)

    def drop(self, lane: str) -> None:
        """Idempotent."""
        entry = self._lanes.pop(lane, None)
        if entry is not None:
            entry.lease.close()
            self._recent.remove(entry)

    def close(self) -> None:
        """The connection has ended. Idempotent."""
        self._closed = True
        for lane in list(self._lanes):
            self.drop(lane)

    def check(self, entry: Entry) -> None:
        """Raises AssertionError if one that is held is not one of these."""
        assert self._lanes[entry.lane] is entry
        assert entry.lease.held == len(entry.items) <= MAX_HISTORY
        assert len(self._lanes) <= MAX_LANES

    def __repr__(self) -> str:
        return f"<Newest {[entry.id for entry in self._lanes.values()]}>"


class Lane:
    """The newest responses of a connection, for one message of one lane. warms: the client gets none of its output."""

    __slots__ = ("_lane", "_newest", "warms")

    def __init__(self, newest: NewestResponses, lane: str, *, warms: bool) -> None:
        self._newest = newest
        self._lane = lane
        self.warms = warms

    @property
    def largest(self) -> int:
        """Bytes of a history that may be remembered."""
        return self._newest.largest

    def find(self, id_: str) -> bytes | None:
        """The history of a response, of whichever lane."""
        return self._newest.find(id_)

    def remember(self, id_: str, items: bytes) -> None:
        """The newest response of this lane."""
        self._newest.remember(self._lane, id_, items)

    def __repr__(self) -> str:
        return f"<Lane {self._lane or '-'} of {self._newest!r}>"
