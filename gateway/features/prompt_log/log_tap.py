"""Names of answers: an answer passes, and gets its name at its end.

A plain answer gets it in its header, a stream before its end:

    chat       a chunk with the member `prompt_log`, before [DONE]
    Messages   an event `prompt_log`, before `message_stop`
    Responses  the member `prompt_log` of the last response object

An answer without an end has no name, nor has a very large one. If the turn is to be kept, the end is held until it is durable,
or cannot be kept; in Responses the history of stored responses does both. No other event is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.sse import EventData, data_of
from gateway.dialects.finished_answer import LENGTH, MAX_ANSWER, FinishedAnswer
from gateway.dialects.json_edits import apply, read_object
from gateway.dialects.json_structure import exceeds
from gateway.dialects.usage import Usage
from gateway.features.prompt_log.header import answer_line
from gateway.features.prompt_log.kept_turn import KeptTurn, TurnKeeper
from gateway.features.prompt_log.log_reader import LogReader
from gateway.features.prompt_log.log_request import LogRequest
from gateway.features.prompt_log.naming.answers import MAX_VALUES, entries_in, entries_of, response_entries
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import extended, head_name
from gateway.features.prompt_log.naming.entries import Entry
from gateway.features.prompt_log.naming.forms import CHAT, MESSAGES, RESPONSES
from gateway.features.prompt_log.once.repeating import facts_of
from gateway.features.prompt_log.turns.answers import (
    COMPLETED,
    INCOMPLETE,
    AnswerTurn,
    plain_answer,
    streamed_answer,
)
from gateway.request.exchange import AnswerTap, Exchange

_DONE: Final = b"[DONE]"
_STOP: Final = "message_stop"
_LAST: Final = frozenset(["response.completed", "response.incomplete"])

Told = dict[str, str | int | bool]


class LogTap(AnswerTap):
    """Names the answer of one request, and keeps its turn. inner: another tap that the answer passes first; None: none. keeper:
    stores turns of chat and Messages; None: turns are not kept. wall_clock: Unix seconds.
    """

    __slots__ = ("_chain", "_entries", "_exchange", "_form", "_inner", "_keeper", "_length", "_request", "_turn", "_wall_clock")

    def __init__(
        self, exchange: Exchange, request: LogRequest, keeper: TurnKeeper | None, wall_clock: Callable[[], float]
    ) -> None:
        assert request.names is not None
        self._exchange = exchange
        self._form = request.form
        self._request = request
        self._chain, _, self._length = request.names
        self._turn: KeptTurn | None = request.turn
        keeps = request.turn is not None and request.turn.keeps and request.form != RESPONSES
        self._keeper = keeper if keeps else None
        self._wall_clock = wall_clock
        self._entries: list[Entry] | None = None  # of a kept answer; None: it has no name
        self._inner = exchange.tap
        exchange.tap = self
        exchange.assemble()
        late = exchange.api.stream and self._turn is not None  # a stream tells at its end whether its turn is kept
        told = {name: value for name, value in request.told.items() if not (late and name in ("kept", "ref"))}
        exchange.head_lines = self._line({"length": self._length, **told})

    def repeatable(self) -> bool:
        return self._inner is None or self._inner.repeatable()

    def reader(self, inner: StreamReader) -> StreamReader:
        inner = self._inner.reader(inner) if self._inner is not None else inner
        return LogReader(inner, self._is_last, self._with_name, keeps=self._keeper is not None)

    async def ended(self, reader: StreamReader) -> bytes:
        assert isinstance(reader, LogReader)
        self._set_issuer()
        if self._keeper is None:
            assert self._inner is not None
            if self._turn is not None:
                self._turn.answered = self._answer
            return reader.passed_end(await self._inner.ended(reader.inner))
        answer = self._answer
        await self._keep(answer, lambda open_: streamed_answer(_whole(answer), self._form, open_), reader.usage)
        return reader.ending()

    async def whole(self, body: bytes) -> bytes:
        self._set_issuer()
        answer = self._answer
        if self._keeper is not None:
            await self._keep(answer, lambda open_: plain_answer(body, self._form, open_))
        client_body = await self._inner.whole(body) if self._inner is not None else body
        if answer is not None and answer.whole:
            try:
                told = self._told(self._entries if self._keeper is not None else entries_in(body, self._form))
                self._exchange.head_lines = self._line(told)
            except NoNameError:
                pass  # the answer's header has the names of the input only
        return client_body

    def _set_issuer(self) -> None:
        if self._turn is not None:
            self._turn.issuer = self._exchange.target.pool

    async def _keep(
        self, answer: FinishedAnswer | None, turn_of: Callable[[tuple[str, ...]], AnswerTurn], usage: Usage | None = None
    ) -> None:
        """Keeps the turn with a whole answer, if it has a name. turn_of: the answer after these open calls. usage: of a stream,
        if its client does not get it.
        """
        turn, keeper = self._turn, self._keeper
        assert turn is not None
        assert keeper is not None
        if answer is None or not answer.whole:
            turn.ended("unfit")
            return
        try:
            found = turn_of(turn.own_turn.open)
            self._entries = found.entries
            if self._request.wishes.once:
                turn.facts = facts_of(answer, answer.usage or usage)
            await keeper.keep(turn, found, INCOMPLETE if answer.finish_reason == LENGTH else COMPLETED)
        except NoNameError:
            turn.ended("unfit")

    def _is_last(self, event: bytes) -> bool:
        """True if this event ends a stream of the dialect."""
        if self._form == CHAT:
            return data_of(event).strip() == _DONE
        name = name_of(event)
        return name == _STOP if self._form == MESSAGES else name in _LAST

    def _with_name(self, event: bytes) -> bytes:
        """The last event, with the answer's name in it or before it; unchanged if the answer has no name."""
        try:
            if self._form == RESPONSES:
                return self._in_response(event)
            told = self._told(self._entries if self._keeper is not None else self._streamed())
        except (NoNameError, ValueError, LookupError):
            if self._keeper is None:
                return event
            told = {name: value for name, value in self._request.told.items() if name in ("kept", "ref")}
        if self._form == CHAT:
            return self._chunk(told) + event
        return b"event: prompt_log\ndata: %b\n\n%b" % (orjson.dumps({"type": "prompt_log", "prompt_log": told}), event)

    @property
    def _answer(self) -> FinishedAnswer | None:
        assembly = self._exchange.assembly
        return assembly.answer if assembly is not None else None

    def _streamed(self) -> list[Entry]:
        """The entries of a streamed answer of chat or Messages. Raises NoNameError."""
        answer = self._answer
        if answer is None or not answer.whole:
            raise NoNameError("the answer has no end")
        return entries_of(answer, self._form)

    def _told(self, entries: list[Entry] | None) -> Told:
        """The members about the log with these entries. Raises NoNameError."""
        if entries is None:
            raise NoNameError("the answer has no name")
        told: Told = {"head": head_name(extended(self._chain, entries)), "length": self._length + len(entries)}
        if self._turn is not None and self._turn.expires_at is not None:
            moved = {"ref": self._turn.move.moved} if self._turn.move is not None else {}
            return told | self._request.told | {"expires": int(self._turn.expires_at), "kept": True, **moved}
        return told | self._request.told

    def _line(self, told: Told) -> bytes:
        assert self._request.names is not None
        return answer_line(self._chain, self._request.names[1], told)

    def _chunk(self, told: Told) -> bytes:
        answer = self._answer
        chunk: dict[str, Any] = {"id": answer.id if answer is not None else "", "object": "chat.completion.chunk"}
        chunk |= {"created": int(self._wall_clock()), "model": answer.model if answer is not None else ""}
        return b"data: %b\n\n" % orjson.dumps(chunk | {"choices": [], "prompt_log": told})

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

    def __repr__(self) -> str:
        return f"<LogTap of {self._length} entries>"


def _whole(answer: FinishedAnswer | None) -> FinishedAnswer:
    assert answer is not None
    return answer
