"""How much of what has arrived is read in one turn of the event loop.

A read brings up to 256 KiB, and most of it costs next to nothing: it is passed on as it is. But each line end may be the end of
a chunk, a header or an event, which is work by itself: whoever sends little else could hold the event loop for a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

AT_ONCE: Final = 4096  # bytes: so many are always read at once, whatever they are
LARGE: Final = 32 << 10  # bytes: after such a read of a replica's answer, the next one is in another turn
TURN_S: Final = 0.0005  # for what is late, on one connection
_LINES: Final = 256  # line ends in one part, where they are evenly spread


def first_turn(data: bytes) -> int:
    """How many of these bytes to read now; the rest is to wait for the next turn. O(bytes)."""
    size = len(data)
    if size <= AT_ONCE or _line_ends(data, 0, size) <= _LINES:
        return size
    return _part(data, 0)


def _part(data: bytes, at: int) -> int:
    """How many of the bytes from there on to read at once: by those that come next, for lines may be dense in one place."""
    size = min(LARGE, len(data) - at)
    if size <= AT_ONCE // 4 or (lines := _line_ends(data, at, at + size)) <= _LINES:
        return size
    return min(size, max(AT_ONCE // 4, size * _LINES // lines))


def _line_ends(data: bytes, begin: int, end: int) -> int:
    return data.count(b"\n", begin, end) + data.count(b"\r", begin, end)


class Late:
    """What has arrived on a connection and is to be read in later turns, in parts.

    size: bytes that are to be read. held: bytes in memory; what was read of one piece is there until all of it was.
    """

    __slots__ = ("_at", "_data", "_due", "_more", "size")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0  # what of it was read
        self._more = bytearray()  # what comes behind _data: in one piece, for it may come byte by byte
        self._due = False
        self.size = 0

    @property
    def held(self) -> int:
        return len(self._data) + len(self._more)

    def first(self, data: bytes) -> bytes:
        """While nothing is late: what of this to read now; the rest is late."""
        now = first_turn(data)
        if now == len(data):
            return data
        self._data, self._at, self.size = data, now, len(data) - now
        return data[:now]

    def add(self, data: bytes) -> None:
        """This is late as well."""
        self._more += data
        self.size += len(data)

    def turn(self) -> Iterator[bytes]:
        """The next parts, until they have taken `TURN_S`."""
        end = time.perf_counter() + TURN_S
        while self.size:
            if self._at == len(self._data):
                self._data, self._at, self._more = bytes(self._more), 0, bytearray()
            begin = self._at
            self._at += _part(self._data, begin)
            part = self._data[begin : self._at]
            self.size -= len(part)
            if not self.size:
                self._data, self._at = b"", 0
            yield part
            if time.perf_counter() > end:
                return

    def schedule(self, loop: asyncio.AbstractEventLoop, turn: Callable[[], None]) -> None:
        """Call it in the next turn of the event loop; it is to call `due` first."""
        if not self._due:
            self._due = True
            loop.call_soon(turn)

    def waits(self) -> bool:
        return self.size > 0

    def due(self) -> None:
        """The turn has come."""
        self._due = False

    def clear(self) -> None:
        self._data, self._at, self._more, self.size = b"", 0, bytearray(), 0

    def __repr__(self) -> str:
        return f"<Late {self.size} bytes>"
