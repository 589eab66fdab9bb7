"""Names of answers: an answer passes, and gets its name at its end.

A plain answer gets it in its header, a stream before its end:

    chat       a chunk with the member `prompt_log`, before [DONE]
    Messages   an event `prompt_log`, before `message_stop`
    Responses  the member `prompt_log` of the last response object

An answer without an end has no name, nor has a very large one. No event is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.sse import EventData, data_of
from gateway.dialects.finished_answer import MAX_ANSWER, FinishedAnswer
from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.json_structure import exceeds
from gateway.features.prompt_log.header import answer_line
from gateway.features.prompt_log.log_reader import LogReader
from gateway.features.prompt_log.naming.answers import MAX_VALUES, entries_in, entries_of, response_entries
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import extended, head_name
from gateway.features.prompt_log.naming.entries import Entry
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, LogNames
from gateway.request.exchange import AnswerTap, Exchange

_DONE: Final = b"[DONE]"
_STOP: Final = "message_stop"
_LAST: Final = frozenset(["response.completed", "response.incomplete"])


class LogTap(AnswerTap):
    """Names the answer of one request. names: of its input. refused: members of the answer's header (`header.py`). inner:
    another tap that the answer passes first; None: none. wall_clock: Unix seconds.
    """

    __slots__ = ("_exchange", "_form", "_inner", "_names", "_refused", "_wall_clock")

    def __init__(
        self, exchange: Exchange, form: str, names: LogNames, refused: tuple[str, ...], wall_clock: Callable[[], float]
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._names = names
        self._refused = refused
        self._wall_clock = wall_clock
        self._inner = exchange.tap
        exchange.tap = self
        exchange.assemble()
        exchange.head_lines = answer_line(names, refused)

    def repeatable(self) -> bool:
        return self._inner is None or self._inner.repeatable()

    def reader(self, inner: StreamReader) -> StreamReader:
        return LogReader(self._inner.reader(inner) if self._inner is not None else inner, self._is_last, self._with_name)

    async def ended(self, reader: StreamReader) -> bytes:
        assert isinstance(reader, LogReader)
        assert self._inner is not None
        return reader.passed_end(await self._inner.ended(reader.inner))

    async def whole(self, body: bytes) -> bytes:
        answer = self._answer
        if answer is not None and answer.whole:
            try:
                head, length = self._extended(entries_in(body, self._form))
                self._exchange.head_lines = answer_line(self._names, self._refused, head, length)
            except NoNameError:
                pass  # the answer's header has the names of the input only
        return await self._inner.whole(body) if self._inner is not None else body

    def _is_last(self, event: bytes) -> bool:
        """True if this event ends a stream of the dialect."""
        if self._form == CHAT:
            return data_of(event).strip() == _DONE
        name = name_of(event)
        return name == _STOP if self._form == MESSAGES else name in _LAST

    def _with_name(self, event: bytes) -> bytes:
        """The last event, with the answer's name in it or before it; unchanged if the answer has no name."""
        try:
            if self._form == CHAT:
                return self._chunk(self._streamed()) + event
            if self._form == MESSAGES:
                told = {"type": "prompt_log", "prompt_log": self._streamed()}
                return b"event: prompt_log\ndata: %b\n\n%b" % (orjson.dumps(told), event)
            return self._in_response(event)
        except (NoNameError, ValueError, LookupError):
            return event

    @property
    def _answer(self) -> FinishedAnswer | None:
        assembly = self._exchange.assembly
        return assembly.answer if assembly is not None else None

    def _streamed(self) -> dict[str, Any]:
        """The names of a streamed answer of chat or Messages. Raises NoNameError."""
        answer = self._answer
        if answer is None or not answer.whole:
            raise NoNameError("the answer has no end")
        return self._told(entries_of(answer, self._form))

    def _told(self, entries: list[Entry]) -> dict[str, Any]:
        head, length = self._extended(entries)
        return {"head": head, "length": length, **dict.fromkeys(self._refused, False)}

    def _chunk(self, told: dict[str, Any]) -> bytes:
        answer = self._answer
        assert answer is not None
        chunk = {"id": answer.id, "object": "chat.completion.chunk", "created": int(self._wall_clock())}
        return b"data: %b\n\n" % orjson.dumps(chunk | {"model": answer.model, "choices": [], "prompt_log": told})

    def _in_response(self, event: bytes) -> bytes:
        """Raises NoNameError, ValueError or LookupError."""
        data = EventData(event)
        if len(event) > MAX_ANSWER or exceeds(data.text, MAX_VALUES):
            raise NoNameError("the answer is too large")
        start, end = read_object(data.text).spans["response"]
        response = data.text[start:end]
        told = self._told(response_entries(orjson.loads(response), self._answer))
        member = read_object(response).put("prompt_log", orjson.dumps(told))
        return data.edited([(start, end, apply(response, [member]))])

    def _extended(self, entries: list[Entry]) -> tuple[str, int]:
        """The head and the length of the log with these entries. Raises NoNameError."""
        return head_name(extended(self._names.chain, entries)), self._names.length + len(entries)

    def __repr__(self) -> str:
        return f"<LogTap of {self._names.length} entries>"
