"""Entries of requests that have ended and are not in the database yet, bounded in bytes.

When it is full, new entries are dropped and counted, and those that are in it stay: what is missing in the end is one interval,
from the moment when it was full to the return of the database, and a batch whose commit was in doubt is not lost in between.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

ENTRY_BYTES: Final = 1_000  # of memory that an entry takes, but for the texts that clients choose
_CHAR_BYTES: Final = 4  # of memory, at most

# at (Unix seconds of its end), id, tenant, key, label, model, alias, pool, replica, endpoint; status, stream, cancelled,
# resumed, failed attempts, error; seconds, seconds to the first byte (None: there was none); tokens predicted and available;
# consumed (None: nothing was metered), bill (None: no price); bytes. One is made for each request: a tuple takes least.
Entry = tuple[Any, ...]


class Buffer:
    """See the top of this file. most_bytes: of all entries. entries: that are in it. dropped: since it was made."""

    __slots__ = ("_queue", "bytes", "dropped", "entries", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.entries = 0
        self.dropped = 0
        self._queue: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        """O(1)."""
        size: int = entry[-1]
        if self.bytes + size > self.most_bytes:
            self.dropped += 1
            return
        self.bytes += size
        self.entries += 1
        self._queue.append(entry)

    def take(self, most: int) -> list[Entry]:
        """The oldest ones, in order. They count until `release`. O(most)."""
        queue = self._queue
        return [queue.popleft() for _ in range(min(most, len(queue)))]

    def release(self, entries: list[Entry]) -> None:
        """They are in the database, or given up. O(entries)."""
        for entry in entries:
            self.bytes -= entry[-1]
        self.entries -= len(entries)

    def check(self) -> None:
        """With nothing taken."""
        assert self.entries == len(self._queue)
        assert self.bytes == sum(entry[-1] for entry in self._queue) <= self.most_bytes

    def __repr__(self) -> str:
        return f"<Buffer {self.entries} entries, {self.bytes} of {self.most_bytes} bytes, {self.dropped} dropped>"


def size_of(model: str, alias: str, error: str) -> int:
    """Bytes of memory that an entry takes."""
    return ENTRY_BYTES + _CHAR_BYTES * (len(model) + len(alias) + len(error))
