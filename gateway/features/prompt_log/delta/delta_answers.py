"""Streams of a gateway that keeps logs: the names in the stream are read and taken out, and the client gets the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Answers, AnswerTail, Dialect, StreamReader
from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.sse import EventData, object_of
from gateway.dialects.json_edits import read_object
from gateway.dialects.usage import Usage
from gateway.features.histories.held import HeldReader
from gateway.request.answer_assembly import AnswerAssembly

_MEMBER: Final = "prompt_log"
_MARKS: Final = (b'"prompt_log"',)
_WRITTEN: Final = b',"prompt_log":'
Told = Callable[[Any, list[str]], None]
"""Gets the names in the answer (a JSON value; None: they are in its header), and the ids of the answer's calls."""


class DeltaAnswers(Answers):
    """Reads the answer to one request as its dialect does. told: gets the names once, if the answer is whole. assembly: for the
    same answer. keeps: the client gets the names, too.
    """

    def __init__(self, dialect: Dialect, told: Told, assembly: AnswerAssembly, *, keeps: bool = False) -> None:
        self._dialect = dialect
        self._keeps = keeps
        self._told = told
        self._assembly = assembly

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return DeltaReader(self._dialect.reader(api, watchful=watchful), self._told, self._assembly, keeps=self._keeps)

    def first_event(self, begin: bytes) -> FirstEvent | None:
        return self._dialect.first_event(begin)

    def usage_of(self, body: bytes) -> Usage | None:
        usage = self._dialect.usage_of(body)
        self._assembly.read(body)
        if (answer := self._assembly.answer) is not None:
            self._told(None, [part.id for part in answer.calls])
        return usage

    def object_in(self, begin: bytes) -> str:
        return self._dialect.object_in(begin)

    def answer_tail(self, begin: bytes) -> AnswerTail | None:
        return self._dialect.answer_tail(begin)


class DeltaReader(HeldReader):
    """Takes the names out of a stream: a chunk of chat, an event of Messages, a member of the last object of Responses. Nothing
    is held.
    """

    def __init__(self, inner: StreamReader, told: Told, assembly: AnswerAssembly, *, keeps: bool) -> None:
        super().__init__(inner, _MARKS)
        self._keeps = keeps
        self._told = told
        self._assembly = assembly

    def passed_on(self, data: bytes) -> bytes:
        self._assembly.feed(data)
        return super().passed_on(data)

    def taken(self, event: bytes) -> bytes | None:
        if event.find(_MARKS[0]) < 0:
            return event
        found = object_of(event)
        if _MEMBER in found and not found.get("choices"):
            self._tell(found[_MEMBER])
            return event if self._keeps else b""
        response = found.get("response")
        if not isinstance(response, dict) or _MEMBER not in response:
            return event
        self._tell(response[_MEMBER])
        return event if self._keeps else _without_member(event)

    def _tell(self, names: Any) -> None:
        if (answer := self._assembly.answer) is not None:
            self._told(names, [part.id for part in answer.calls])


def _without_member(event: bytes) -> bytes:
    """The event without the last member of its response."""
    data = EventData(event)
    try:
        start, _ = read_object(data.text).spans["response"]
        first, end = read_object(data.text, start).spans[_MEMBER]
    except (LookupError, ValueError):
        return event
    begin = first - len(_WRITTEN)
    return data.edited([(begin, end, b"")]) if data.text[max(0, begin) : first] == _WRITTEN else event
