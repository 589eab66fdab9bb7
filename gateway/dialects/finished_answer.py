"""A finished answer as a value, in one form for all dialects: assembled from a body, or from a stream as it comes.

    stream ── feed, event by event ──┐
    body ──── read ──────────────────┴── AnswerAssembler: parts ── answer ──► FinishedAnswer

Each dialect in which a model answers has an assembler (`Dialect.assembler`). The same answer gives the same value, from a body
and from a stream, independently of its chunks. A stream that is cut gives the value so far, which is not `whole`. Unknown
events and members are ignored. An assembler raises for nothing that an engine sends: an answer with more than MAX_ANSWER bytes,
MAX_PARTS parts or MAX_VALUES values, or of another form, has no value. Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.events.splitter import Splitter
from gateway.dialects.events.sse import MAX_PARSED_EVENT, data_of
from gateway.dialects.json_structure import exceeds
from gateway.dialects.usage import Usage

MAX_ANSWER: Final = 4 << 20  # bytes of texts and arguments, and of a body or an event; the longest answers of 2026 have one MiB
MAX_NAME: Final = 1024  # characters of an id, of a model's or tool's name, of a reason, of a stop sequence
MAX_PARTS: Final = 2048
MAX_VALUES: Final = 1 << 16  # of a body or an event, as `json_structure` counts them

TEXT, REASONING, REFUSAL, CALL, SEALED = "text", "reasoning", "refusal", "call", "sealed"
STOP, LENGTH, TOOL_CALLS, CONTENT_FILTER = "stop", "length", "tool_calls", "content_filter"


class AnswerPart:
    """A part of an answer: a text, a thought, a refusal, a call, or bytes that only their issuer can read.

    id: of a call. name: of a call; of a thought, the name of its member; of sealed bytes, the name of their block or member.
    signature: of a thought in Messages.
    """

    __slots__ = ("id", "kind", "name", "signature", "written")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.id = ""
        self.name = ""
        self.signature = ""
        self.written = bytearray()  # in one piece: it may come byte by byte

    @property
    def text(self) -> str:
        """The text of the part; of a call its arguments, JSON as the model wrote it."""
        return self.written.decode()

    def __repr__(self) -> str:
        return f"<AnswerPart {self.kind} {self.name!r}, {len(self.written)} bytes>"


class FinishedAnswer:
    """The value (see the module). parts: in their order. finish_reason: in chat's words, "" while there is none. stop: the stop
    sequence that ended the text, if the engine names it. token_ids: of the answer, if the engine sends them. done: the end that
    its dialect writes has come. pieces: of text, in a stream of chat. foreign: it has blocks of Messages that are no parts.
    """

    __slots__ = ("done", "finish_reason", "foreign", "id", "model", "parts", "pieces", "stop", "token_ids", "usage")

    def __init__(self) -> None:
        self.id = ""
        self.model = ""
        self.parts: list[AnswerPart] = []
        self.finish_reason = ""
        self.stop = ""
        self.token_ids: list[int] = []
        self.usage: Usage | None = None
        self.done = self.foreign = False
        self.pieces = 0

    @property
    def whole(self) -> bool:
        """True if the answer has its end. A limit of the request (`length`) is an end."""
        return self.done and self.finish_reason != ""

    @property
    def text(self) -> str:
        return self.joined(TEXT)

    @property
    def reasoning(self) -> str:
        return self.joined(REASONING)

    @property
    def refusal(self) -> str:
        return self.joined(REFUSAL)

    @property
    def calls(self) -> list[AnswerPart]:
        return self.of(CALL)

    @property
    def tokens(self) -> int:
        """Tokens generated so far, in a stream of chat: a piece is a token, unless the usage reports more."""
        return max(self.usage.completion, self.pieces) if self.usage else self.pieces

    def of(self, kind: str) -> list[AnswerPart]:
        return [part for part in self.parts if part.kind == kind]

    def joined(self, kind: str) -> str:
        return "".join([part.text for part in self.of(kind)])

    def __repr__(self) -> str:
        return f"<FinishedAnswer {self.id!r}, {self.parts}, {self.finish_reason!r}{'' if self.whole else ', in part'}>"


class UnreadableAnswerError(Exception):
    """An answer without a value: too large, or of another form than its dialect's."""


class AnswerAssembler:
    """Assembles one answer: `feed` its stream and `finish`, or `read` its body; then take the `answer`. O(bytes).

    value: so far, without its parts.
    """

    def __init__(self) -> None:
        self.value = FinishedAnswer()
        self._parts: dict[tuple[int, int], AnswerPart] = {}
        self._splitter = Splitter()
        self._size = 0
        self._failed = self._unreadable = False

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return self._size + self._splitter.held

    @property
    def held(self) -> int:
        """Bytes of an event that is not whole."""
        return self._splitter.held

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        if not self._unreadable:
            for event in self._splitter.feed(data):
                self._take(event)
            if self._splitter.held > MAX_ANSWER:
                self.drop()

    def finish(self) -> None:
        """The stream is over; its last event may lack its end."""
        rest = self._splitter.finish()
        if rest and not (self._failed or self._unreadable):
            with contextlib.suppress(UnreadableAnswerError):  # it is cut
                self.event(rest)

    def read(self, body: bytes) -> None:
        """A whole plain answer."""
        try:
            self.body(object_in(body))
        except UnreadableAnswerError:
            self.drop()
        self.value.done = not self._failed

    def answer(self) -> FinishedAnswer | None:
        """The value so far, the same object each time. None: it has no value."""
        if self._unreadable:
            return None
        self.value.parts = [self._parts[key] for key in sorted(self._parts)]
        return self.value

    def drop(self) -> None:
        """Give the value up. Idempotent."""
        self._unreadable = True
        self._parts.clear()
        self._splitter.drop()
        self._size = 0

    def _take(self, event: bytes) -> None:
        if self._failed or self._unreadable:
            return
        try:
            self.event(event)
        except UnreadableAnswerError:
            self.drop()

    # -- for dialects; these methods raise UnreadableAnswerError

    def event(self, event: bytes) -> None:
        """Read an event."""
        raise NotImplementedError

    def body(self, answer: dict[str, Any]) -> None:
        """Read a body."""
        raise NotImplementedError

    def failed(self) -> None:
        """Stop reading: the stream reports a failure, and nothing after it makes the answer whole."""
        self._failed = True

    def head(self, answer: dict[str, Any]) -> None:
        """Take the first id and the first model."""
        id_, model = answer.get("id"), answer.get("model")
        if isinstance(id_, str) and not self.value.id:
            self.value.id = _bounded(id_)
        if isinstance(model, str) and not self.value.model:
            self.value.model = _bounded(model)

    def end(self, reason: str, stop: str = "") -> None:
        """Set the finish reason and the stop sequence."""
        self.value.finish_reason, self.value.stop = _bounded(reason), _bounded(stop)

    def part(self, place: int, number: int, kind: str) -> AnswerPart:
        """The part at this place, a new one if there is none."""
        found = self._parts.get((place, number))
        if found is None:
            if len(self._parts) == MAX_PARTS:
                raise UnreadableAnswerError
            found = self._parts[place, number] = AnswerPart(kind)
        return found

    def name(self, part: AnswerPart, id_: str, name: str) -> None:
        """Set a part's id and name."""
        self.hold(len(id_) + len(name) - len(part.id) - len(part.name))
        part.id, part.name = id_, name

    def write(self, part: AnswerPart, text: Any) -> None:
        """Append a piece to a part, if it is a text."""
        if isinstance(text, str) and text:
            self.value.pieces += part.kind == TEXT
            raw = text.encode()
            part.written += raw
            self.hold(len(raw))

    def hold(self, size: int) -> None:
        """Count held bytes."""
        self._size += size
        if self._size > MAX_ANSWER:
            raise UnreadableAnswerError

    def parts(self, kind: str) -> list[AnswerPart]:
        return [part for part in self._parts.values() if part.kind == kind]

    def forget(self, place: int | None = None) -> None:
        """Drop the parts at this place (None: all parts), because they are repeated as a whole."""
        for key in [key for key in self._parts if place is None or key[0] == place]:
            part = self._parts.pop(key)
            self._size -= len(part.written) + len(part.id) + len(part.name)


def object_in(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises UnreadableAnswerError if it is none, or too large."""
    if len(text) > MAX_ANSWER or (len(text) > MAX_PARSED_EVENT and exceeds(text, MAX_VALUES)):
        raise UnreadableAnswerError
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UnreadableAnswerError from error
    if not isinstance(found, dict):
        raise UnreadableAnswerError
    return found


def text_in(holder: Mapping[str, Any], name: str) -> str:
    """A member that is a text; "": it is none."""
    text = holder.get(name)
    return text if isinstance(text, str) else ""


def object_of_event(event: bytes) -> dict[str, Any]:
    """The object of an event's data, {} without data. Raises UnreadableAnswerError."""
    text = data_of(event).strip()
    return object_in(text) if text else {}


def _bounded(text: str) -> str:
    """An id, a name or a reason. Raises UnreadableAnswerError if it is longer than any."""
    if len(text) > MAX_NAME:
        raise UnreadableAnswerError
    return text
