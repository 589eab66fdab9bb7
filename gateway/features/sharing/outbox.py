"""Messages that wait until the store has taken them. No I/O.

While the store is away, items wait: of MOST_BYTES at most, then all of them are dropped, and what follows, until `reopen`. Then
the others have to be told the open bookings, and offered the rest. All that is open may be more than MOST_BYTES, so while the
store takes items MOST_TAKEN_BYTES may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.features.sharing.messages import MAX_ITEMS, Item

MOST_BYTES: Final = 8 << 20
MOST_TAKEN_BYTES: Final = 256 << 20
ENVELOPE_BYTES: Final = 128 << 10  # from which on an envelope is full: a reader takes some milliseconds for it
ITEM_BYTES: Final = 32  # about what an item takes beside its events


class Outbox:
    """See the top of this file."""

    def __init__(self, clock: Callable[[], float], most_bytes: int = MOST_BYTES) -> None:
        self.dropped = 0  # items so far
        self.lost_since: float | None = None  # items are dropped since then
        self.taken = False  # the store takes items
        self._clock = clock
        self._most_bytes = most_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._oldest = 0.0  # when the first of them was added

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item, size: int = 0) -> None:
        """size: of its events in bytes."""
        if self.lost_since is not None:
            self.dropped += 1
            return
        if not self._items:
            self._oldest = self._clock()
        self._items.append((item, size + ITEM_BYTES))
        self._bytes += size + ITEM_BYTES
        if self._bytes > (MOST_TAKEN_BYTES if self.taken else self._most_bytes):
            self.dropped += len(self._items)
            self.lost_since = self._oldest
            self._items.clear()
            self._bytes = 0

    def take(self) -> tuple[Item, ...]:
        """Remove and return as many of the oldest as an envelope takes; at least one, if there are any."""
        taken: list[Item] = []
        size = 0
        while self._items and len(taken) < MAX_ITEMS:
            size += self._items[0][1]
            if taken and size > ENVELOPE_BYTES:
                break
            item, length = self._items.popleft()
            self._bytes -= length
            taken.append(item)
        return tuple(taken)

    def reopen(self) -> float | None:
        """The store takes items again. Returns since when items were dropped; None: none were."""
        since, self.lost_since = self.lost_since, None
        return since

    def __repr__(self) -> str:
        return f"<Outbox of {len(self._items)} items, {self._bytes} bytes, {self.dropped} dropped so far>"
