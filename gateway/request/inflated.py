"""Reads compressed answers that have to be read: of replicas that compress them unasked, and whose answers are translated.
All others pass unread.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Answers, OuterReader, StreamReader
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError
from gateway.request.exchange import Exchange
from gateway.request.forms import EVENTS_LINE, SHOWN, note_form
from gateway.request.phases.replies import JSON_LINE
from gateway.upstream.client import ReplicaAnswer

CODINGS: Final = frozenset(["gzip", "x-gzip", "deflate"])
MOST: Final = 8 << 20  # bytes that a piece, or a whole answer, may become
MEMBERS: Final = 256  # of a gzip answer
SEARCHED: Final = 4096  # compressed bytes in which an answer's first bytes are
_ANY_HEADER: Final = 47  # zlib's and gzip's, with the largest window
_NO_HEADER: Final = -15
_GZIP: Final = b"\x1f\x8b"
_PLAIN: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:[{\[][\s\"{\[\]}]|data:|event:|:)")


class InflationError(GatewayError):
    """An answer cannot be inflated."""


class AnswerInflater:
    """Inflates one answer, piece by piece: gzip in any number of members, zlib, deflate without a header, and plain bytes
    under a wrong head. Raises InflationError, because other replicas would only compute the same again.
    """

    def __init__(self) -> None:
        self._members = 0
        self._begin = b""
        self._stream: zlib._Decompress | None = None
        self._plain = self._over = False

    def feed(self, data: bytes) -> bytes:
        """O(bytes)."""
        if self._plain or self._over:
            return data if self._plain else b""
        if self._stream is None:
            data = self._begin = self._begin + data
            if len(data) < len(_GZIP):
                return b""
            if _PLAIN.match(data):
                self._plain = True
                return data
            self._begin, self._stream = b"", zlib.decompressobj(_ANY_HEADER if _has_header(data) else _NO_HEADER)
        return self._inflated(data)

    def _inflated(self, data: bytes) -> bytes:
        made, left = list[bytes](), MOST
        while data:
            assert self._stream is not None
            try:
                made.append(self._stream.decompress(data, left + 1))
            except zlib.error as error:
                raise _unreadable("its compression is broken") from error
            left -= len(made[-1])
            if left < 0 or self._stream.unconsumed_tail:
                raise _unreadable(f"a compressed answer becomes more than {MOST} bytes")
            data = self._stream.unused_data
            if len(data) >= len(_GZIP) and not data.startswith(_GZIP):
                self._over = True  # some writers pad the end
                break
            if not data.startswith(_GZIP):
                break  # nothing, or the first byte of a member, which stays in `unused_data`
            self._members += 1
            if self._members > MEMBERS:
                raise _unreadable(f"a compressed answer has more than {MEMBERS} members")
            self._stream = zlib.decompressobj(_ANY_HEADER)
        return b"".join(made)


class InflatedReader(OuterReader):
    """Reads a compressed stream. inner: reads it as it was before. A chunk of it is an inflated chunk of the compressed one."""

    def __init__(self, inner: StreamReader) -> None:
        super().__init__(inner)
        self._inflater = AnswerInflater()

    def feed(self, chunk: bytes) -> bytes:
        return self._noted(self.inner.feed(self._inflater.feed(chunk)))

    def finish(self) -> bytes:
        return self._noted(self.inner.finish())

    def _noted(self, out: bytes) -> bytes:
        self.note()
        self.within_event, self.holds = self.inner.within_event, self.inner.holds
        return out


class InflatedAnswers(Answers):
    """The answers to one request. inner: reads them as they were before."""

    def __init__(self, inner: Answers) -> None:
        self.translated, self.collects = inner.translated, inner.collects
        self._inner = inner

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return InflatedReader(self._inner.reader(api, watchful=watchful))

    def collecting(self) -> StreamReader:
        return InflatedReader(self._inner.collecting())

    def usage_of(self, body: bytes) -> Usage | None:
        return self._inner.usage_of(AnswerInflater().feed(body))

    def whole(self, body: bytes) -> bytes:
        return self._inner.whole(AnswerInflater().feed(body))

    def as_stream(self, api: ApiRequest, body: bytes) -> bytes:
        return self._inner.as_stream(api, AnswerInflater().feed(body))

    def error(self, status: int, body: bytes) -> bytes:
        return self._inner.error(status, body)


def inflated_begin(data: bytes, coding: str, most: int) -> bytes:
    """The first bytes of an answer with this content coding, up to `most`, as far as they can be read; `data` without one."""
    if coding not in CODINGS:
        return data
    if len(data) < len(_GZIP):
        return b""
    if _PLAIN.match(data):
        return data[:most]
    try:
        return zlib.decompressobj(_ANY_HEADER if _has_header(data) else _NO_HEADER).decompress(data, most)
    except zlib.error:
        return b""


async def read_inflated(exchange: Exchange, answer: ReplicaAnswer) -> None:
    """Have the current replica's answer inflated, and set its content type by its first bytes. Raises GatewayError 502 for an
    unknown coding: other replicas would only compute the same again.
    """
    coding = answer.head.fields.compression
    if coding not in CODINGS:
        wrong = f"compressed its answer ({coding[:40]}), which therefore cannot be translated. Turn that off there."
        text, public = f"The replica {exchange.booking.chosen.replica} has {wrong}", f"The model's server has {wrong}"
        raise GatewayError(502, "replica_failed", text, public=public)
    exchange.answers = InflatedAnswers(exchange.answers)
    exchange.attempts.lines = EVENTS_LINE if exchange.api.stream else JSON_LINE
    await note_form(answer, lambda data: inflated_begin(data, coding, SHOWN), SEARCHED)


def _has_header(data: bytes) -> bool:
    """True if the data begin as gzip or zlib do (RFC 1952, section 2.3; RFC 1950, section 2.2)."""
    return data.startswith(_GZIP) or (data[0] & 0x0F == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0)


def _unreadable(why: str) -> InflationError:
    text = f"The model's server has compressed its answer, which cannot be translated: {why}."
    return InflationError(502, "replica_failed", text)
