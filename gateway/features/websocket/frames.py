"""WebSocket frames (RFC 6455, section 5): parses the frames of a client, and makes frames for it. Pure.

    bytes ── FrameReader.read ──► Frames: pieces of text messages, ping, pong, close

Messages are not assembled here: the owner of the bytes charges them, so each piece is returned unmasked as soon as it is
received. A reader accepts only text messages without extensions. A violation sets `error`, with the code for the close frame,
and ends the reading. Frames without payload are six bytes long, and each costs work, so `read` returns at most MAX_FRAMES, and
the caller continues in another turn of the event loop (`more`).
"""

from __future__ import annotations

import codecs
import struct
from typing import Final

MAX_FRAMES: Final = 256
MAX_CONTROL: Final = 125  # bytes of the payload of a ping, a pong or a close

TEXT, PING, PONG, CLOSE = "text", "ping", "pong", "close"
NORMAL, GOING_AWAY, PROTOCOL_ERROR, NOT_TEXT, NOT_UTF8 = 1000, 1001, 1002, 1003, 1007
POLICY, TOO_LARGE, INTERNAL_ERROR, NO_STATUS = 1008, 1009, 1011, 1005

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_KNOWN: Final = frozenset([_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG])
_CONTROLS: Final = {_CLOSE: CLOSE, _PING: PING, _PONG: PONG}
_FINAL, _RESERVED, _OPCODE, _MASKED, _LENGTH = 0x80, 0x70, 0x0F, 0x80, 0x7F
_SHORT: Final = struct.Struct(">H")
_LONG: Final = struct.Struct(">Q")


class Frame:
    """kind: TEXT, PING, PONG or CLOSE. data: unmasked; for TEXT a piece of a message. last: the last piece."""

    __slots__ = ("data", "kind", "last")

    def __init__(self, kind: str, data: bytes, *, last: bool = True) -> None:
        self.kind = kind
        self.data = data
        self.last = last

    def __repr__(self) -> str:
        return f"<Frame {self.kind}, {len(self.data)} bytes{', last' if self.last else ''}>"


class FrameError(Exception):
    """The client has violated the protocol. code: for the close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class FrameReader:
    """Parses frames. max_message: bytes of a message.

    more: the fed bytes may contain further frames. error: why reading has ended. in_message: a message has begun.
    """

    def __init__(self, max_message: int) -> None:
        self.max_message = max_message
        self.more = False
        self.error: FrameError | None = None
        self.in_message = False
        self._data = b""  # not parsed yet
        self._left = 0  # outstanding bytes of a text frame's payload
        self._last = False  # the text frame is the last one of its message
        self._mask = b""
        self._size = 0  # received bytes of the message
        self._closed = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._split = False  # the last piece ended within a character

    def feed(self, data: bytes) -> None:
        """Adds received bytes; ignored after an error or the client's close frame."""
        if not (self.error or self._closed):
            self._data = self._data + data if self._data else data

    def read(self) -> list[Frame]:
        """The next frames. O(bytes fed)."""
        made = list[Frame]()
        self.more = False
        data, at = self._data, 0
        try:
            while at >= 0 and len(made) < MAX_FRAMES and not (self._closed or self.error):
                self._data = b""
                begin = at
                at = self._payload(data, at, made) if self._left else self._frame(data, at, made)
                if at < 0:
                    at = begin
                    break
        except FrameError as error:
            self.error = error
            self._data = b""
            return made
        self._data = data[at:]
        self.more = len(made) >= MAX_FRAMES and bool(self._data)
        return made

    def _payload(self, data: bytes, at: int, made: list[Frame]) -> int:
        """More of a text frame. Returns its end, or -1 if no byte is available."""
        piece = data[at : at + self._left]
        if not piece:
            return -1
        self._left -= len(piece)
        plain = unmasked(piece, self._mask)
        turn = len(piece) % 4
        self._mask = self._mask[turn:] + self._mask[:turn]
        self._append_piece(plain, made)
        return at + len(piece)

    def _frame(self, data: bytes, at: int, made: list[Frame]) -> int:
        """The head of the next frame; for a control frame also its payload. Returns the end, or -1 if it is incomplete."""
        size = len(data) - at
        if size < 2:
            return -1
        first, second = data[at], data[at + 1]
        opcode, length = first & _OPCODE, second & _LENGTH
        if first & _RESERVED or opcode not in _KNOWN:
            raise FrameError(PROTOCOL_ERROR, "a frame of an extension that was not negotiated")
        if not second & _MASKED:
            raise FrameError(PROTOCOL_ERROR, "a client's frame must be masked")
        if opcode >= _CLOSE and (length > MAX_CONTROL or not first & _FINAL):
            raise FrameError(PROTOCOL_ERROR, "a control frame that is too long or in parts")
        body = at + 6 + (2 if length == 126 else 8 if length == 127 else 0)
        if len(data) < body:
            return -1
        if length == 126:
            length = _SHORT.unpack_from(data, at + 2)[0]
        elif length == 127:
            length = _LONG.unpack_from(data, at + 2)[0]
        mask = data[body - 4 : body]
        if opcode >= _CLOSE:
            if len(data) < body + length:
                return -1
            self._control(opcode, unmasked(data[body : body + length], mask), made)
            return body + length
        self._begin(opcode, length)
        self._left, self._mask, self._last = length, mask, bool(first & _FINAL)
        if not length:
            self._append_piece(b"", made)
        return body

    def _begin(self, opcode: int, length: int) -> None:
        """Checks the next frame of a message."""
        if opcode == _BINARY:
            raise FrameError(NOT_TEXT, "messages must be text")
        if (opcode == _TEXT) == self.in_message:
            raise FrameError(PROTOCOL_ERROR, "a message begins within another one, or continues without a beginning")
        self._size = length if opcode == _TEXT else self._size + length
        self.in_message = True
        if self._size > self.max_message:
            raise FrameError(TOO_LARGE, f"a message of more than {self.max_message} bytes")

    def _append_piece(self, plain: bytes, made: list[Frame]) -> None:
        """Appends a piece of a message."""
        last = self._last and not self._left
        if self._split or last or not plain.isascii():
            try:
                self._utf8.decode(plain, last)
            except UnicodeDecodeError as error:
                raise FrameError(NOT_UTF8, "a text that is not UTF-8") from error
            self._split = bool(self._utf8.getstate()[0])
        if last:
            self.in_message = False
        if plain or last:
            made.append(Frame(TEXT, plain, last=last))

    def _control(self, opcode: int, data: bytes, made: list[Frame]) -> None:
        if opcode == _CLOSE:
            code_of(data)
            self._closed = True
        made.append(Frame(_CONTROLS[opcode], data))

    def __repr__(self) -> str:
        return f"<FrameReader {'in' if self.in_message else 'between'} messages, {len(self._data)} bytes unread>"


def unmasked(data: bytes, mask: bytes) -> bytes:
    """Unmasks data that begin at the mask's first byte. O(length)."""
    size = len(data)
    if not size:
        return b""
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


def code_of(close: bytes) -> int:
    """The code in the payload of a close frame, or NO_STATUS. Raises FrameError."""
    if not close:
        return NO_STATUS
    code = _SHORT.unpack_from(close)[0] if len(close) >= 2 else 0
    if not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise FrameError(PROTOCOL_ERROR, "a close frame with a code that must not be sent")
    try:
        close[2:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise FrameError(NOT_UTF8, "a close frame with a reason that is not UTF-8") from error
    return int(code)


def text_frame(data: bytes) -> bytes:
    """A complete text message."""
    return _frame(_TEXT, data)


def ping_frame() -> bytes:
    return _frame(_PING, b"")


def pong_frame(data: bytes) -> bytes:
    """data: of the ping."""
    return _frame(_PONG, data)


def close_frame(code: int, reason: str = "") -> bytes:
    """code: NO_STATUS: a frame without a code."""
    if code == NO_STATUS:
        return _frame(_CLOSE, b"")
    text = reason.encode()[: MAX_CONTROL - 2].decode("utf-8", "ignore").encode()
    return _frame(_CLOSE, _SHORT.pack(code) + text)


def _frame(opcode: int, data: bytes) -> bytes:
    size = len(data)
    if size <= MAX_CONTROL:
        head = bytes((_FINAL | opcode, size))
    elif size < 1 << 16:
        head = bytes((_FINAL | opcode, 126)) + _SHORT.pack(size)
    else:
        head = bytes((_FINAL | opcode, 127)) + _LONG.pack(size)
    return head + data
