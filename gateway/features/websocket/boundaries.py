"""Finds the frame boundaries of a tunneled WebSocket, so that the gateway can append its own frame. Pure.

Only frame heads are parsed; payloads pass unchanged, compressed or not. Frames may be two bytes long, and each costs work.
After a read with more than MAX_FRAMES, parsing stops, and no frame can be appended. A `FrameTap` observes the frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_FRAMES: Final = 4096
CONTROLS: Final = 8  # opcodes of control frames, and above

_CLOSE, _OPCODE, _MASKED, _LENGTH = 8, 0x0F, 0x80, 0x7F
_LENGTHS: Final = {126: 2, 127: 8}


class FrameTap:
    """Base class, which ignores the frames. It must keep no reference to `data`."""

    def frame(self, first: int, second: int, length: int, data: bytes, begin: int, end: int) -> None:
        """A frame begins: the first two bytes of its head, its length, and the received part of its payload,
        data[begin:end].
        """

    def more(self, data: bytes, end: int) -> None:
        """More of the current frame's payload: data[:end]."""

    def lost(self) -> None:
        """Parsing has stopped."""


class MessageTap(FrameTap):
    """Calls `messages` for each frame of a message."""

    def __init__(self, messages: Callable[[], None]) -> None:
        self._messages = messages

    def frame(self, first: int, second: int, length: int, data: bytes, begin: int, end: int) -> None:
        if first & _OPCODE < CONTROLS:
            self._messages()


class Boundaries:
    """One direction of a WebSocket. closing: a close frame has passed. between: the passed bytes end with a complete frame.
    lost: parsing has stopped. tap: observes the frames.
    """

    def __init__(self, tap: FrameTap | None = None) -> None:
        self._tap = tap or FrameTap()
        self.closing = False
        self.lost = False
        self._head = b""  # the incomplete head of a frame
        self._left = 0  # outstanding bytes of a payload

    @property
    def between(self) -> bool:
        return not (self.lost or self._head or self._left)

    def feed(self, data: bytes) -> None:
        """O(frames)."""
        if self.lost:
            return
        if self._head:
            data, self._head = self._head + data, b""
        at, size, frames = min(self._left, len(data)), len(data), 0
        self._left -= at
        self._tap.more(data, at)
        while at < size:
            frames += 1
            if frames > MAX_FRAMES:
                self.lost = True
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
        return f"<Boundaries {'lost' if self.lost else 'between' if self.between else 'within'} frames>"
