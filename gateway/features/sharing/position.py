"""Position of a gateway in the stream, and the number of entries that it reads at once. No I/O.

The ids of a stream begin with the server's time. One that was flushed, or is of a server whose clock is behind, has ids before
the position: then it is read from its beginning, or from its end.
"""

from __future__ import annotations

from typing import Final

from gateway.features.sharing.server.client import InvalidReplyError

BACKLOG_S: Final = 2.5  # that a new gateway reads, to know the others
READ_MOST: Final = 256  # entries at once; fewer after a read that took too long
READ_LESS: Final = 16  # by which they are divided then
FUTURE_S: Final = 120.0  # that an id may be ahead of the server's clock, which was set back, or is another server's

BEGINNING: Final = b"0-0"


class Position:
    """See the top of this file. id: the last one that was read. most: entries to be read at once."""

    def __init__(self) -> None:
        self.id = BEGINNING
        self.most = READ_MOST
        self._begun = False
        self._ahead_s = 0.0  # the server's clock less ours
        self._written: bytes | None = None  # the last id of our own

    def attach(self, last: bytes, server_s: float, now: float) -> None:
        """To a stream with this last id, at this time of the server. Raises InvalidReplyError."""
        self._ahead_s = server_s - now
        order = order_of(last)
        if not self._begun:
            self.id, self._begun = b"%d-0" % ((server_s - BACKLOG_S) * 1000), True
        elif order_of(self.id) > order:
            self.id = last

    def wrote(self, entry: bytes, now: float) -> bool:
        """An entry of our own. Returns whether the stream can go on: somebody may have written an id of the future, behind
        which all others follow, and none becomes old. Raises InvalidReplyError.
        """
        order = order_of(entry)
        if self._begun and order < order_of(self.id):
            self.id = BEGINNING  # the stream was begun anew
        self._written = entry
        return order[0] / 1000 <= now + self._ahead_s + FUTURE_S

    def read(self, entry: bytes) -> float:
        """An entry was read. Returns the server's time of it. Raises InvalidReplyError."""
        millis, _ = order_of(entry)
        self.id = entry
        return millis / 1000

    def late(self) -> None:
        """An answer did not come in time: less is read at once, and at last what cannot be had is passed over."""
        if self.most == 1 and self._written is not None:
            self.id = self._written
        self.most = max(1, self.most // READ_LESS)

    def in_time(self) -> None:
        """An answer came in time."""
        self.most = min(READ_MOST, 2 * self.most)

    def __repr__(self) -> str:
        return f"<Position {self.id!r}, {self.most} at once>"


def order_of(entry: bytes) -> tuple[int, int]:
    """By which ids are compared: milliseconds, and a number. Raises InvalidReplyError."""
    first, _, second = entry.partition(b"-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise InvalidReplyError(f"{entry[:40]!r} is not the id of an entry") from None
