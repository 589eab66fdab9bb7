"""Where the frames of a passing WebSocket end, so that one of ours can be put behind them. Pure.

Only heads are read: payloads, compressed or not, pass as they are. Frames may be two bytes long, and each costs work: where
more than MAX_FRAMES come in one read, the place is lost, and nothing can be put there any more. A `FrameTap` sees
the frames in passing.
"""

from __future__ import annotations

from typing import Final

MAX_FRAMES: Final = 4096

_CLOSE, _OPCODE, _MASKED, _LENGTH = 8, 0x0F, 0x80, 0x7F
_LENGTHS: Final = {126: 2, 127: 8}


class FrameTap:
    """Base class: sees nothing. What it is given lies in `data`, of which it keeps no reference."""

    def frame(self, first: int, second: int, length: int, data: bytes, begin: int, end: int) -> None:
        """A frame begins: the bytes of its head, its length, and what of its payload is here: data[begin:end]."""

    def more(self, data: bytes, end: int) -> None:
        """More of the current frame's payload: data[:end]."""

    def lost(self) -> None:
        """Nobody knows any more where frames begin."""


class Boundaries:
    """One direction. closing: a close frame has passed. between: what has passed ends with a whole frame.

    tap: sees the frames.
    """

    def __init__(self, tap: FrameTap | None = None) -> None:
        self._tap = tap or FrameTap()
        self.closing = False
        self._lost = False
        self._head = b""  # of a frame that has not passed whole
        self._left = 0  # bytes of a payload that are still to come

    @property
    def between(self) -> bool:
        return not (self._lost or self._head or self._left)

    def feed(self, data: bytes) -> None:
        """O(frames)."""
        if self._lost:
            return
        if self._head:
            data, self._head = self._head + data, b""
        at, size, frames = min(self._left, len(data)), len(data), 0
        self._left -= at
        self._tap.more(data, at)
        while at < size:
            frames += 1
            if frames > MAX_FRAMES:
                self._lost = True
                self._tap.lost()
                return
            if size - at < 2:
                break
            first, second = data[at], data[at + 1]
            length = second & _LENGTH
            wide = _LENGTHS.get(length, 0)
            begin = at + 2 + wide + (4 if second & _MASKED else 0)
            if begin > size:
                break
            if wide:
                length = int.from_bytes(data[at + 2 : at + 2 + wide], "big")
            if first & _OPCODE == _CLOSE:
                self.closing = True
            at = begin + length
            self._tap.frame(first, second, length, data, begin, min(at, size))
        if at < size:
            self._head = data[at:]
        else:
            self._left += at - size

    def __repr__(self) -> str:
        return f"<Boundaries {'lost' if self._lost else 'between' if self.between else 'within'} frames>"
