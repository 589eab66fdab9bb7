"""Messages that wait to be written to the store. No I/O.

While the store is unavailable, at most MAX_UNSENT_BYTES wait. Beyond that, all of them are dropped, and all later ones until
`reopen`. Then the gateway publishes its open bookings, and offers the rest as a snapshot. The open bookings may exceed
MAX_UNSENT_BYTES, so while the store accepts messages, MAX_UNSENT_CONNECTED_BYTES may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.features.sharing.messages import MAX_ITEMS, Item

MAX_UNSENT_BYTES: Final = 8 << 20
MAX_UNSENT_CONNECTED_BYTES: Final = 256 << 20
ENVELOPE_BYTES: Final = 128 << 10  # size of a full envelope, which takes a reader some milliseconds
ITEM_BYTES: Final = 32  # estimated size of an item without its events


class Outbox:
    """The queue of messages, bounded in bytes."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_UNSENT_BYTES) -> None:
        self.dropped = 0  # number of dropped items
        self.lost_since: float | None = None  # time of the first dropped item
        self.connected = False  # the store accepts items
        self._clock = clock
        self._max_bytes = max_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._oldest = 0.0  # time of the oldest waiting item

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item, size: int = 0) -> None:
        """size: of its events, in bytes."""
        if self.lost_since is not None:
            self.dropped += 1
            return
        if not self._items:
            self._oldest = self._clock()
        self._items.append((item, size + ITEM_BYTES))
        self._bytes += size + ITEM_BYTES
        if self._bytes > (MAX_UNSENT_CONNECTED_BYTES if self.connected else self._max_bytes):
            self.dropped += len(self._items)
            self.lost_since = self._oldest
            self._items.clear()
            self._bytes = 0

    def take(self) -> tuple[Item, ...]:
        """Removes and returns the oldest items, at most one envelope; at least one item, if there are any."""
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
        """Accepts items again. Returns the time since which items were dropped; None: none were."""
        since, self.lost_since = self.lost_since, None
        return since

    def __repr__(self) -> str:
        return f"<Outbox of {len(self._items)} items, {self._bytes} bytes, {self.dropped} dropped so far>"
