"""Parser of a replica's HTTP/1.1 responses: bytes in, head and body out. Pure; the chunking of the input does not matter.

    head ──► body (by length, in chunks, until the end; of a 101 that was asked for: until the end) ──► complete

Ambiguous messages are refused, because request smuggling works by two parsers that disagree about a message's end (RFC 9112,
sections 6.3 and 11.2): two lengths, a length beside a transfer coding, a coding other than `chunked`, folded lines, bare CR or
LF, spaces before a colon, control characters. A tab is part of the value, as in llhttp: not every parser strips it. The end of
a message is exact; bytes after it are kept apart (`rest`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

# Maximum of all heads of one answer together, interim ones (1xx) included; also of its trailers.
MAX_HEAD_BYTES: Final = 64 << 10
MAX_TRAILER_BYTES: Final = 4096  # of a request; they are not charged to its client
MAX_CHUNK_LINE: Final = 4096  # a chunk's size and its extensions, which are ignored

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_VALUE: Final = rb"[^\x00-\x08\x0a-\x1f\x7f]*+"
_HEAD: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: (%s))?\r\n((?:%s:%s\r\n)*+)\r\n" % (_VALUE, _TOKEN, _VALUE))
_HEADER: Final = re.compile(rb"([^:]++):([^\r]*+)\r\n")
_TRAILERS: Final = re.compile(rb"(?:%s:%s\r\n)*+\r\n" % (_TOKEN, _VALUE))
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;%s)?\r\n" % _VALUE)
# Fast path for the sizes of nearly all chunks: of two or three digits.
_SIZES: Final = {b"%x\r\n" % size: size for size in range(4096)}
_CR: Final = 0x0D
_LF: Final = 0x0A
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_USUAL_DIGITS: Final = 12
# A replica's heads differ in their length and, once a second, in their date: parsed heads are cached without the length.
_MAX_CACHED_BYTES: Final = 2048

SWITCHING: Final = 101
_BODILESS: Final = frozenset([204, 304])

# The parser's next step. Numbers and not bound methods, which would make a reference cycle per answer.
_HEAD_NEXT: Final = 0
_LENGTH_NEXT: Final = 1
_END_NEXT: Final = 2  # everything up to the connection's end is body
_CHUNK_LINE_NEXT: Final = 3
_CHUNK_NEXT: Final = 4
_TRAILERS_NEXT: Final = 5
_NOTHING_NEXT: Final = 6
_NAMES: Final = ("head", "length", "until_end", "chunk_line", "chunk", "trailers", "nothing")


class FramingError(Exception):
    """The bytes are not one unambiguous HTTP/1.1 answer."""


class AnswerFields:
    """A parsed head, before its framing is checked. headers: in order, names in lower case, values stripped of spaces.
    http11: HTTP/1.1, else 1.0. compression: the content coding, "" for none. persistent: the connection can be reused if the
    body has an end. downstream_lines: cached lines for the client (`headers.py`); locations: headers not among them, because
    they depend on the replica.
    """

    __slots__ = (
        "codings",
        "compression",
        "content_type",
        "downstream_lines",
        "headers",
        "http11",
        "lengths",
        "locations",
        "persistent",
        "reason",
        "status",
    )

    def __init__(self, status: int, reason: bytes, http11: bool, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reason = reason
        self.http11 = http11
        self.headers = headers
        self.lengths = [value for name, value in headers if name == b"content-length"]
        self.codings = [value for name, value in headers if name == b"transfer-encoding"]
        tokens = {token.strip() for name, value in headers if name == b"connection" for token in value.lower().split(b",")}
        self.persistent = b"close" not in tokens and (http11 or b"keep-alive" in tokens)
        kinds = [value for name, value in headers if name == b"content-type"]
        self.content_type = kinds[0].partition(b";")[0].strip().lower().decode("latin-1") if kinds else ""
        codings = [value for name, value in headers if name == b"content-encoding"]
        self.compression = "" if not codings or codings == [b"identity"] else b", ".join(codings).lower().decode("latin-1")
        self.downstream_lines: bytes | None = None
        self.locations: list[tuple[bytes, bytes]] = []


class AnswerHead:
    """A final answer's head. length: of the body, in bytes; None: chunked if `chunked`, else until the connection ends.

    `headers` may lack the Content-Length that frames the body.
    """

    __slots__ = ("chunked", "fields", "keep_alive", "length", "status")

    def __init__(self, fields: AnswerFields, length: int | None, *, chunked: bool) -> None:
        self.fields = fields
        self.status = fields.status
        self.length = length
        self.chunked = chunked
        self.keep_alive = fields.persistent and (chunked or length is not None)

    @property
    def reason(self) -> bytes:
        return self.fields.reason

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.fields.headers

    def get(self, name: bytes) -> bytes:
        """The first value of a header, b"" if absent."""
        return next((value for key, value in self.fields.headers if key == name), b"")


class AnswerParser:
    """Parses one answer. `feed` and `end` may be called until `complete` or an error.

    head: None until it is parsed. complete: the message has ended. rest: bytes after its end.
    """

    __slots__ = ("_buffer", "_left", "_method_head", "_skipped", "_step", "_upgrades", "complete", "head", "rest")

    def __init__(self, *, to_head: bool = False, upgrades: bool = False) -> None:
        """to_head: the request was a HEAD, so there is no body. upgrades: it asked for another protocol: the body of a 101
        lasts until the connection ends.
        """
        self._method_head = to_head
        self._upgrades = upgrades
        self._buffer = b""
        self._left = 0  # remaining bytes of the body or chunk
        self._skipped = 0  # bytes of interim heads; for trailers, bytes that they may not use
        self._step = _HEAD_NEXT
        self.head: AnswerHead | None = None
        self.complete = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes; returns the body bytes among them. Raises FramingError."""
        return self._read(self._buffer + data if self._buffer else data)

    def end(self) -> None:
        """The connection has ended. Raises FramingError if the answer is incomplete."""
        if self._step == _END_NEXT:
            self.complete = True
        elif not self.complete:
            raise FramingError("the connection ended within the answer")

    def _read(self, data: bytes) -> bytes:
        step = self._step
        if step == _CHUNK_LINE_NEXT:
            return self._read_chunk_line(data)
        if step == _LENGTH_NEXT:
            return self._read_length(data)
        if step == _HEAD_NEXT:
            return self._read_head(data)
        if step == _CHUNK_NEXT:
            return self._read_chunk(data)
        if step == _END_NEXT:
            return data
        if step == _TRAILERS_NEXT:
            return self._read_trailers(data)
        self.rest += data
        return b""

    # -- the steps: each takes all unparsed bytes and returns the body bytes among them

    def _read_head(self, data: bytes) -> bytes:
        """Parse the head; interim answers (1xx) are skipped."""
        at, seen = 0, max(0, len(self._buffer) - 3)  # `seen`: bytes already searched for the end
        while True:
            end = data.find(b"\r\n\r\n", max(at, seen))
            least = (end if end >= 0 else len(data) - 3) - at  # minimum size of this head
            if self._skipped + least > MAX_HEAD_BYTES:
                raise FramingError("the head is too long")
            if end < 0:
                if not b"HTTP/1.".startswith(data[at : at + 7]):
                    raise FramingError("the answer is not HTTP/1")
                self._buffer = data[at:]
                return b""
            head = parse_head(data[at : end + 4], bodiless=self._method_head)
            if head.status == SWITCHING and not self._upgrades:
                raise FramingError("the answer switches protocols")
            if head.status >= 200 or head.status == SWITCHING:
                return self._begin_body(head, data[end + 4 :])
            self._skipped += end + 4 - at
            at = end + 4

    def _begin_body(self, head: AnswerHead, rest: bytes) -> bytes:
        self.head, self._buffer = head, b""
        if head.chunked:
            self._step = _CHUNK_LINE_NEXT
        elif head.length is None:
            self._step = _END_NEXT
        else:
            self._left = head.length
            self._step = _LENGTH_NEXT
        return self._read(rest) if rest or head.length == 0 else b""

    def _read_length(self, data: bytes) -> bytes:
        if len(data) < self._left:
            self._left -= len(data)
            return data
        body = data[: self._left]
        self._finish(data[self._left :])
        return body

    def _read_chunk_line(self, data: bytes) -> bytes:
        """Parses complete chunks in a loop; the other steps parse an incomplete one."""
        parts: list[bytes] = []
        at = 0
        while True:
            line = data[at : at + (5 if len(data) > at + 3 and data[at + 3] == _CR else 4)]
            size = _SIZES.get(line, -1)
            if size < 0:  # the search takes three times as much
                end = data.find(b"\n", at, at + MAX_CHUNK_LINE)
                if end < 0:
                    return self._wait_for_line(data[at:], parts)
                line = data[at : end + 1]
                size = _chunk_size(line)
            begin = at + len(line)
            at = begin + size
            if not size:
                self._step = _TRAILERS_NEXT
                parts.append(self._read_trailers(data[begin:]))
                return b"".join(parts)
            if len(data) < at + 2:
                self._left, self._step, self._buffer = size, _CHUNK_NEXT, b""
                parts.append(self._read_chunk(data[begin:]))
                return b"".join(parts)
            if data[at] != _CR or data[at + 1] != _LF:
                raise FramingError("a chunk is longer than its size line says")
            parts.append(data[begin:at])
            at += 2
            if at == len(data):  # usually there is one chunk per read
                return self._wait_for_line(b"", parts)

    def _wait_for_line(self, rest: bytes, parts: list[bytes]) -> bytes:
        if len(rest) >= MAX_CHUNK_LINE:
            raise FramingError("a chunk's size takes too long")
        self._step, self._buffer = _CHUNK_LINE_NEXT, rest
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_chunk(self, data: bytes) -> bytes:
        """The rest of a chunk, returned as it arrives, and its line end."""
        left = self._left
        if len(data) <= left:
            self._left = left - len(data)
            return data
        self._left = 0
        if len(data) < left + 2:
            if data[left] != _CR:
                raise FramingError("a chunk is longer than its size line says")
            self._buffer = data[left:]
            return data[:left]
        if data[left : left + 2] != b"\r\n":
            raise FramingError("a chunk is longer than its size line says")
        self._buffer, self._step = b"", _CHUNK_LINE_NEXT
        body = data[:left]
        return body + self._read_chunk_line(data[left + 2 :]) if len(data) > left + 2 else body

    def _read_trailers(self, data: bytes) -> bytes:
        """Check and drop trailers: it is too late to forward them as headers."""
        end = 0 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n") + 2
        if (end if end != 1 else len(data) - 3) + self._skipped > MAX_HEAD_BYTES:
            raise FramingError("the trailers are too long")
        if end == 1:
            self._buffer = data
            return b""
        if not _TRAILERS.fullmatch(data, 0, end + 2):
            raise FramingError("a trailer is not one")
        self._finish(data[end + 2 :])
        return b""

    def _finish(self, rest: bytes) -> None:
        self.complete, self.rest, self._buffer, self._left = True, rest, b"", 0
        self._step = _NOTHING_NEXT

    def __repr__(self) -> str:
        state = "complete" if self.complete else _NAMES[self._step]
        return f"<Answer {self.head.status if self.head else 'without head'}, {state}, {self._left} bytes left>"


def chunked_body() -> AnswerParser:
    """A parser for the chunked body of a request, whose head is parsed elsewhere."""
    body = AnswerParser()
    body._step = _CHUNK_LINE_NEXT
    body._skipped = MAX_HEAD_BYTES - MAX_TRAILER_BYTES
    return body


def parse_head(data: bytes, *, bodiless: bool = False) -> AnswerHead:
    """The parsed head. data: a head including its empty line. bodiless: it answers a HEAD. Raises FramingError."""
    if not bodiless and len(data) <= _MAX_CACHED_BYTES:
        rest, known = split_length(data)
        if known >= 0:
            fields = _parse_cached(rest)
            if not fields.lengths and not fields.codings and fields.status >= 200 and fields.status not in _BODILESS:
                return AnswerHead(fields, known, chunked=False)
    fields = _parse_cached(data) if len(data) <= _MAX_CACHED_BYTES else _parse(data)
    length, chunked = _body_of(fields.lengths, fields.codings, fields.http11)
    if fields.status == SWITCHING:
        return AnswerHead(fields, None, chunked=False)
    if bodiless or fields.status in _BODILESS or fields.status < 200:
        length, chunked = 0, False
    return AnswerHead(fields, length, chunked=chunked)


def split_length(head: bytes) -> tuple[bytes, int]:
    """A head without the line of its Content-Length, and that length. The head and -1 if it has none, or an unusual one, which
    the parser of the head reads. (A regular expression takes half as much time again.)
    """
    before, name, rest = head.partition(b"\r\nContent-Length: ")
    if not name:
        before, name, rest = head.partition(b"\r\ncontent-length: ")
    value, end, after = rest.partition(b"\r\n")
    if len(value) > _USUAL_DIGITS or not value.isdigit():
        return head, -1
    return before + end + after, int(value)


def _parse(data: bytes) -> AnswerFields:
    """The fields of a head. Raises FramingError."""
    found = _HEAD.fullmatch(data)
    if not found:
        raise FramingError("the head is not HTTP/1.1")
    headers = [(name.lower(), value.strip(b" ")) for name, value in _HEADER.findall(found[4])]
    return AnswerFields(int(found[2]), found[3] or b"", found[1] == b"1", headers)


_parse_cached: Final = lru_cache(maxsize=256)(_parse)


def _chunk_size(line: bytes) -> int:
    """The size in a chunk's first line. Raises FramingError."""
    size = _SIZES.get(line)
    if size is not None:
        return size
    found = _CHUNK_LINE.fullmatch(line)
    if not found:
        raise FramingError("a chunk's size is not a number")
    return int(found[1], 16)


def _body_of(lengths: list[bytes], codings: list[bytes], http11: bool) -> tuple[int | None, bool]:
    """(length, chunked) by RFC 9112, section 6.3, without its guesses. Raises FramingError."""
    if codings:
        if lengths or not http11 or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise FramingError("the body's coding is ambiguous or not known")
        return None, True
    if not lengths:
        return None, False
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise FramingError("the body's length is ambiguous or not a number")
    return int(lengths[0]), False


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header lines as bytes."""
    parts: list[bytes] = []
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)
