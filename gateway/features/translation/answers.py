"""Reads the chat answer of a replica for a client of another dialect."""

from __future__ import annotations

import orjson

from gateway.dialects.answer import usage_of
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Answers, StreamReader
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.lenient import read_json
from gateway.dialects.openai.stream import ChunkReader, first_event
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure
from gateway.features.translation.translation import Translation


class TranslatedAnswers(Answers):
    """The answers to one request. echo: the part of the request that the answer repeats (`TranslatedRequest`). seed: the
    request's id. estimate: of the prompt's tokens, for answers that begin before the engine reports them.
    """

    def __init__(self, translation: Translation, echo: bytes, seed: str, estimate: int) -> None:
        self.translated = True
        self._translation = translation
        self._echo = echo
        self._seed = seed
        self._estimate = estimate

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return self._translation.reader(self._echo, self._seed, self._estimate)

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return first_event(begin)

    def usage_of(self, body: bytes) -> Usage | None:
        return usage_of(body, parse_usage)

    def collecting(self) -> StreamReader:
        return ChunkReader(strip_usage=False)

    def as_stream(self, api: ApiRequest, body: bytes) -> bytes:
        try:
            return super().as_stream(api, orjson.dumps(read_json(body)))  # on one line
        except (ValueError, TypeError) as error:
            raise ReplicaFailure("garbage", "the answer is not JSON") from error

    def whole(self, body: bytes) -> bytes:
        return self._translation.answer(body, self._echo, self._seed, self._estimate)

    def error(self, status: int, body: bytes) -> bytes:
        return self._translation.error(status, body, self._seed)
