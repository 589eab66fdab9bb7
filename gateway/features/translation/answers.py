"""A chat answer, read for a client of another dialect: what `Dialect` says of answers, for a translated request."""

from __future__ import annotations

from typing import ClassVar

from gateway.dialects.answer import usage_of
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect, StreamOpening, StreamReader
from gateway.dialects.openai.stream import ChatOpening, begins_well
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage
from gateway.features.translation.translation import TranslatedRequest, Translation


class TranslatedAnswers(Dialect):
    """One request's. request: as it goes to replicas that speak chat only. seed: the request's id."""

    name: ClassVar[str] = "translated"

    def __init__(self, translation: Translation, request: TranslatedRequest) -> None:
        self.request = request
        self.seed = ""
        self._translation = translation

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return self._translation.reader(self.request.echo, self.seed)

    def opening(self, data: bytes) -> StreamOpening | None:
        return None if begins_well(data) else ChatOpening()

    def usage_of(self, body: bytes) -> Usage | None:
        return usage_of(body, parse_usage)

    def answer(self, body: bytes) -> bytes:
        """A whole plain answer, as the client reads it. Raises ReplicaFailure if it is no chat completion."""
        return self._translation.answer(body, self.request.echo, self.seed)

    def error(self, status: int, body: bytes) -> bytes:
        """The body of the replica's error, as the client reads it."""
        return self._translation.error(status, body, self.seed)
