"""Reads compressed answers that have to be read: of replicas that compress them unasked, and whose answers are translated.
All others pass unread.
"""

from __future__ import annotations

import zlib
from typing import Final

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Answers, OuterReader, StreamReader
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, ReplicaFailure
from gateway.request.exchange import Exchange
from gateway.request.forms import EVENTS_LINE
from gateway.request.phases.replies import JSON_LINE

CODINGS: Final = frozenset(["gzip", "x-gzip", "deflate"])
MOST: Final = 8 << 20  # bytes that a piece, or a whole answer, may become
_ANY_HEADER: Final = 47  # zlib's and gzip's, with the largest window


class AnswerInflater:
    """Inflates one answer, piece by piece. Raises ReplicaFailure."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_ANY_HEADER)

    def feed(self, data: bytes) -> bytes:
        try:
            out = self._stream.decompress(data, MOST)
        except zlib.error as error:
            raise ReplicaFailure("garbage", "the answer's compression is broken") from error
        if self._stream.unconsumed_tail:
            raise ReplicaFailure("garbage", f"a compressed answer becomes more than {MOST} bytes")
        return out


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


def read_inflated(exchange: Exchange, coding: str) -> None:
    """Have the current replica's answer inflated. Raises GatewayError 502 for an unknown coding: other replicas would only
    compute the same again.
    """
    if coding not in CODINGS:
        wrong = f"compressed its answer ({coding[:40]}), which therefore cannot be translated. Turn that off there."
        text, public = f"The replica {exchange.booking.chosen.replica} has {wrong}", f"The model's server has {wrong}"
        raise GatewayError(502, "replica_failed", text, public=public)
    exchange.answers = InflatedAnswers(exchange.answers)
    exchange.attempts.lines = EVENTS_LINE if exchange.api.stream else JSON_LINE
