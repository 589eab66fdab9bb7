"""The position of a gateway in the stream, and the number of entries per read. No I/O.

The ids of a stream begin with the server's time. A stream that was flushed, or belongs to a server with a slow clock, has ids
before the position. Then it is read from its beginning, or from its end.
"""

from __future__ import annotations

from typing import Final

from gateway.features.sharing.server.client import InvalidReplyError

BACKLOG_S: Final = 2.5  # entries that a new gateway reads, to learn of the others
MAX_ENTRIES_PER_READ: Final = 256  # fewer after a timeout
READ_DIVISOR: Final = 16  # divisor after a timeout
FUTURE_S: Final = 120.0  # tolerated lead of an id over the server's clock, which may have been set back or be another server's

BEGINNING: Final = b"0-0"


class Position:
    """id: of the last entry read. max_entries: per read."""

    def __init__(self) -> None:
        self.id = BEGINNING
        self.max_entries = MAX_ENTRIES_PER_READ
        self._begun = False
        self._ahead_s = 0.0  # the server's clock minus ours
        self._written: bytes | None = None  # id of our last entry

    def attach(self, last: bytes, server_s: float, now: float) -> None:
        """Attaches to a stream with this last id, at this time of the server. Raises InvalidReplyError."""
        self._ahead_s = server_s - now
        order = order_of(last)
        if not self._begun:
            self.id, self._begun = b"%d-0" % ((server_s - BACKLOG_S) * 1000), True
        elif order_of(self.id) > order:
            self.id = last

    def note_written(self, entry: bytes, now: float) -> bool:
        """Notes a written entry of this gateway. Returns False if the stream cannot continue: it has an id in the future, so
        that all later ids follow it and entries never expire. Raises InvalidReplyError.
        """
        order = order_of(entry)
        if self._begun and order < order_of(self.id):
            self.id = BEGINNING  # the stream was deleted and started again
        self._written = entry
        return order[0] / 1000 <= now + self._ahead_s + FUTURE_S

    def note_read(self, entry: bytes) -> float:
        """An entry was read. Returns its time by the server's clock. Raises InvalidReplyError."""
        millis, _ = order_of(entry)
        self.id = entry
        return millis / 1000

    def note_timeout(self) -> None:
        """A read timed out: the next one is smaller. If a single entry times out, skips to our last entry."""
        if self.max_entries == 1 and self._written is not None:
            self.id = self._written
        self.max_entries = max(1, self.max_entries // READ_DIVISOR)

    def note_answer(self) -> None:
        """A read was answered in time."""
        self.max_entries = min(MAX_ENTRIES_PER_READ, 2 * self.max_entries)

    def __repr__(self) -> str:
        return f"<Position {self.id!r}, {self.max_entries} per read>"


def order_of(entry: bytes) -> tuple[int, int]:
    """The sort key of an id: milliseconds and a number. Raises InvalidReplyError."""
    first, _, second = entry.partition(b"-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise InvalidReplyError(f"{entry[:40]!r} is not the id of an entry") from None
