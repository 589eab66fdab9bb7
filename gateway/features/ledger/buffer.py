"""Buffer of entries that are not in the database yet, bounded in bytes.

A full buffer drops and counts new entries, and keeps the old ones. So the ledger lacks one interval, from the moment the buffer
was full to the return of the database, and a batch whose commit is in doubt is not dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

ENTRY_BYTES: Final = 1_000  # memory of an entry, without the texts that clients choose
_CHAR_BYTES: Final = 4  # memory of a character, at most

# end (Unix seconds), id, tenant, key, label, model, alias, pool, replica, endpoint; status, stream, cancelled,
# resumed, failed attempts, error; seconds, seconds to the first byte (None: there was none); tokens predicted and available;
# consumed (None: nothing was metered), bill (None: no price); run and workflow, or ""; session, agent, parent, client,
# user agent, code of the error, or ""; bytes. Each request makes one: a tuple
# is smallest.
Entry = tuple[Any, ...]


class Buffer:
    """A bounded queue of entries. max_bytes: the bound. entries: number of entries in it. dropped: number of dropped
    entries.
    """

    __slots__ = ("_queue", "bytes", "dropped", "entries", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.entries = 0
        self.dropped = 0
        self._queue: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        """Add an entry, or drop it. O(1)."""
        size: int = entry[-1]
        if self.bytes + size > self.max_bytes:
            self.dropped += 1
            return
        self.bytes += size
        self.entries += 1
        self._queue.append(entry)

    def take(self, limit: int) -> list[Entry]:
        """Take the oldest entries, in order. They count towards the bound until `release`. O(limit)."""
        queue = self._queue
        return [queue.popleft() for _ in range(min(limit, len(queue)))]

    def release(self, entries: list[Entry]) -> None:
        """Free the bytes of taken entries. O(entries)."""
        for entry in entries:
            self.bytes -= entry[-1]
        self.entries -= len(entries)

    def check(self) -> None:
        """Check the invariants; no entries may be taken."""
        assert self.entries == len(self._queue)
        assert self.bytes == sum(entry[-1] for entry in self._queue) <= self.max_bytes

    def __repr__(self) -> str:
        return f"<Buffer {self.entries} entries, {self.bytes} of {self.max_bytes} bytes, {self.dropped} dropped>"


def size_of(*chosen: str) -> int:
    """Memory of an entry in bytes. chosen: the texts that clients choose."""
    return ENTRY_BYTES + _CHAR_BYTES * sum(map(len, chosen))
