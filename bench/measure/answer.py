"""Incremental parser of an HTTP/1.1 response, for the load generator.

Words are counted in the decoded body, so that it does not matter how a gateway frames its chunks or writes its JSON.
"""

from __future__ import annotations

WORD = b" word"  # every token of the mock replica
DONE = b"data: [DONE]"
_KEPT = 20  # bytes of the body's end: more than either of them, and the two line ends


class BadAnswer(Exception):
    """The bytes are not an HTTP/1.1 answer with a length."""


class Answer:
    """`feed` until it returns True. words: received so far."""

    __slots__ = ("_buffer", "_chunked", "_end", "_last", "_left", "status", "words")

    def __init__(self) -> None:
        self.status = 0
        self.words = 0
        self._buffer = b""  # of a head or of a line that is not complete
        self._end = b""  # of the body
        self._chunked = False
        self._left = 0  # bytes of the body, or of the chunk
        self._last = False  # the chunk of no bytes was seen

    @property
    def done(self) -> bool:
        """The last event of the stream is OpenAI's."""
        return self._end.rstrip().endswith(DONE)

    def feed(self, data: bytes) -> bool:
        """True when the answer is complete. Raises BadAnswer."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        at = 0
        if not self.status:
            at = data.find(b"\r\n\r\n") + 4
            if at < 4:
                self._buffer = data
                return False
            self._head(data[:at])
        return self._chunks(data, at) if self._chunked else self._plain(data[at:])

    def _head(self, head: bytes) -> None:
        lower = head.lower()
        length = lower.find(b"\r\ncontent-length:")
        self._chunked = b"\r\ntransfer-encoding: chunked" in lower
        if not lower.startswith(b"http/1.1 ") or (length < 0 and not self._chunked):
            raise BadAnswer(f"an answer that begins with {head[:40]!r} and has no length")
        self.status = int(head[9:12])
        if not self._chunked:
            self._left = int(lower[length + 17 : lower.index(b"\r\n", length + 2)])

    def _plain(self, data: bytes) -> bool:
        self._body(data)
        self._left -= len(data)
        if self._left < 0:
            raise BadAnswer(f"{-self._left} bytes after the end of the answer")
        return self._left == 0

    def _chunks(self, data: bytes, at: int) -> bool:
        while True:
            if self._left:
                piece = data[at : at + self._left]
                self._body(piece)
                self._left -= len(piece)
                at += len(piece)
                if self._left:
                    return False
            end = data.find(b"\r\n", at)
            if end < 0:
                self._buffer = data[at:]
                return False
            line, at = data[at:end], end + 2
            if self._last and not line:
                if at < len(data):
                    raise BadAnswer(f"{len(data) - at} bytes after the end of the answer")
                return True
            if line and not self._last:  # an empty one ends the chunk before
                self._left = self._size(line)
                self._last = self._left == 0

    @staticmethod
    def _size(line: bytes) -> int:
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise BadAnswer(f"{line[:40]!r} is no size of a chunk") from None

    def _body(self, piece: bytes) -> None:
        known = self._end
        joined = known + piece
        self.words += joined.count(WORD) - known.count(WORD)
        self._end = joined[-_KEPT:]
