"""Read position of a gateway in the stream, and the number of entries to read at once. No I/O.

The ids of a stream begin with the server's time. After a flush, or with a server whose clock is behind, new ids are lower than
the position: then the stream is read from its beginning, or from its end.
"""

from __future__ import annotations

from typing import Final

from gateway.features.sharing.server.client import InvalidReplyError

BACKLOG_S: Final = 2.5  # a new gateway reads the entries of this period, to find the others
READ_MOST: Final = 256  # entries at once; fewer after a time-out
READ_LESS: Final = 16  # divisor after a time-out
FUTURE_S: Final = 120.0  # an id may be so far ahead of the server's clock: it was set back, or it is another server

BEGINNING: Final = b"0-0"


class Position:
    """See the top of this file. id: of the last entry read. most: number of entries to read at once."""

    def __init__(self) -> None:
        self.id = BEGINNING
        self.most = READ_MOST
        self._begun = False
        self._ahead_s = 0.0  # the server's clock less ours
        self._written: bytes | None = None  # id of our last entry

    def attach(self, last: bytes, server_s: float, now: float) -> None:
        """Start in a stream with this last id, at this time of the server. Raises InvalidReplyError."""
        self._ahead_s = server_s - now
        order = order_of(last)
        if not self._begun:
            self.id, self._begun = b"%d-0" % ((server_s - BACKLOG_S) * 1000), True
        elif order_of(self.id) > order:
            self.id = last

    def wrote(self, entry: bytes, now: float) -> bool:
        """Record an entry of our own. Returns False if the stream is unusable: an id of the future was written, all later ids
        follow it, and no entry expires. Raises InvalidReplyError.
        """
        order = order_of(entry)
        if self._begun and order < order_of(self.id):
            self.id = BEGINNING  # the stream was begun anew
        self._written = entry
        return order[0] / 1000 <= now + self._ahead_s + FUTURE_S

    def read(self, entry: bytes) -> float:
        """Record a read entry. Returns the server's time of it. Raises InvalidReplyError."""
        millis, _ = order_of(entry)
        self.id = entry
        return millis / 1000

    def late(self) -> None:
        """Record a time-out: read less at once, and at last skip the entries before our own last one."""
        if self.most == 1 and self._written is not None:
            self.id = self._written
        self.most = max(1, self.most // READ_LESS)

    def in_time(self) -> None:
        """Record an answer in time: read more at once."""
        self.most = min(READ_MOST, 2 * self.most)

    def __repr__(self) -> str:
        return f"<Position {self.id!r}, {self.most} at once>"


def order_of(entry: bytes) -> tuple[int, int]:
    """The sort key of an id: milliseconds, number. Raises InvalidReplyError."""
    first, _, second = entry.partition(b"-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise InvalidReplyError(f"{entry[:40]!r} is not the id of an entry") from None
