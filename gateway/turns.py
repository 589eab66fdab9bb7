"""How much of what has arrived is read in one turn of the event loop.

A read brings up to 256 KiB, and most of it costs next to nothing: it is passed on as it is. But each line end may be the end of
a chunk, a header or an event, which is work by itself: whoever sends little else could hold the event loop for a second.
"""

from __future__ import annotations

from typing import Final

AT_ONCE: Final = 4096  # bytes: so many are always read at once, whatever they are
_LINES: Final = 256  # line ends


def first_turn(data: bytes) -> int:
    """How many of these bytes to read now; the rest is to wait for the next turn. O(bytes)."""
    size = len(data)
    if size <= AT_ONCE:
        return size
    lines = data.count(b"\n") + data.count(b"\r")
    return size if lines <= _LINES else max(AT_ONCE // 4, size * _LINES // lines)
