"""Edits in the bytes of Anthropic answers, for requests that ask for features which engines lack.

- breakpoints: the usage also counts the tokens newly written to the cache (`cache_split.py`);
- `max_tokens: 0`: the engine is asked for one token, because most refuse 0, and the client gets none;
- `diagnostics`: where the prompt differs from an earlier one (`diagnosis.py`), unless the engine reports that itself.

    whole answer: its members                               stream: message_start, message_delta; for `max_tokens: 0` no content
    inner reader ──► EditedReader ──► the client            the inner reader counts the tokens of the engine

Answers to all other requests bypass this module. No other byte changes. Data that is too large to be parsed, or is no JSON,
passes unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.answer import MAX_PARSED_ANSWER
from gateway.dialects.anthropic.cache_split import CacheSplit, fields_of, split
from gateway.dialects.anthropic.diagnosis import FIELD, MAX_ID_CHARS
from gateway.dialects.anthropic.usage import merge
from gateway.dialects.diagnosis import NOTHING
from gateway.dialects.dialect import AnswerEditor, OuterReader, StreamReader
from gateway.dialects.events.named import name_of
from gateway.dialects.events.reader import has_any
from gateway.dialects.events.sse import MAX_PARSED_EVENT, EventData, events_of
from gateway.dialects.json_edits import Edit, Members, apply, read_object
from gateway.dialects.usage import Usage

_MAX_VALUES: Final = 1 << 15  # of an answer that is edited: 5 ms
_READ: Final = (b"message_",)  # occurs in every event to be edited
_NOTHING: Final[Mapping[str, bytes]] = {"stop_reason": b'"max_tokens"', "stop_sequence": b"null"}


class MessageEditor(AnswerEditor):
    """Edits one answer. marked: where the breakpoints are; None: the usage stays. silent: the client asked for no token.
    diagnosis: JSON; b"": the client did not ask for one.
    """

    def __init__(self, marked: CacheSplit | None, *, silent: bool, diagnosis: bytes = b"") -> None:
        super().__init__()
        self.silent = silent
        self._diagnosis = diagnosis
        self._marked = marked

    def whole(self, body: bytes, usage: Usage | None) -> tuple[bytes, Usage | None]:
        if len(body) > MAX_PARSED_ANSWER:
            return body, usage
        try:
            members = read_object(body, most=_MAX_VALUES)
            edits, split_usage = self._usage_edits(members, {})
            values = {"content": b"[]", **_NOTHING} if self.silent else {}
            edits += members.put_all(values | self._diagnosed(members))
        except ValueError:
            return body, usage
        return apply(body, edits), _counted(usage, split_usage)

    def reader(self, inner: StreamReader) -> StreamReader:
        return EditedReader(inner, self)

    def begun(self, event: bytes, counts: dict[str, Any]) -> bytes:
        """Edits `message_start`. counts: token counts of the stream so far; they are updated."""
        data = EventData(event)
        message = orjson.loads(data.text)["message"]
        merge(counts, message.get("usage"))
        if not self._diagnosis:
            return event
        start, _ = read_object(data.text, most=_MAX_VALUES).spans["message"]
        members = read_object(data.text, start, most=_MAX_VALUES)
        return data.edited(members.put_all(self._diagnosed(members)))

    def ended(self, event: bytes, counts: dict[str, Any]) -> tuple[bytes, Usage | None]:
        """Edits `message_delta`. Returns it, and the usage if it is split here."""
        data = EventData(event)
        members = read_object(data.text, most=_MAX_VALUES)
        edits, usage = self._usage_edits(members, counts)
        if self.silent:
            edits += read_object(data.text, members.spans["delta"][0]).put_all(_NOTHING)
        return (data.edited(edits) if edits else event), usage

    def _diagnosed(self, message: Members) -> dict[str, bytes]:
        """The diagnosis as a member to be added. Stores the message's id."""
        if not self._diagnosis:
            return {}
        start, end = message.spans.get("id", (0, 0))
        id_ = orjson.loads(message.raw[start:end]) if end else None
        if isinstance(id_, str) and len(id_) <= MAX_ID_CHARS:
            self.id = id_
        start, end = message.spans.get(FIELD, (0, 0))
        said = end and message.raw[start:end] != NOTHING
        return {} if said else {FIELD: self._diagnosis}

    def _usage_edits(self, answer: Members, counts: dict[str, Any]) -> tuple[list[Edit], Usage | None]:
        """The edits of the usage, none if the answer has no usage. Raises ValueError for malformed JSON."""
        start, end = answer.spans.get("usage", (0, 0))
        given = orjson.loads(answer.raw[start:end]) if end else None
        if not isinstance(given, dict):
            return [], None
        merge(counts, given)
        usage = split(counts, self._marked) if self._marked else None
        new: dict[str, Any] = fields_of(usage) if usage else {}
        if self.silent:
            new["output_tokens"] = 0
        if not new:
            return [], None
        return read_object(answer.raw, start).put_all({name: orjson.dumps(value) for name, value in new.items()}), usage


class EditedReader(OuterReader):
    """Stands between the reader of a stream and the client. The inner reader passes on whole events, except for events too long
    to be parsed, which are not edited. O(bytes).
    """

    def __init__(self, inner: StreamReader, editor: MessageEditor) -> None:
        super().__init__(inner)
        self._editor = editor
        self._counts = dict[str, Any]()
        self._split: Usage | None = None

    def feed(self, chunk: bytes) -> bytes:
        within = self.inner.within_event
        return self._read(self.inner.feed(chunk), within=within)

    def finish(self) -> bytes:
        within = self.inner.within_event
        return self._read(self.inner.finish(), within=within)

    def _read(self, data: bytes, *, within: bool) -> bytes:
        """within: the data continues an event whose beginning has been passed on."""
        if self._editor.silent or has_any(data, _READ):
            out = list[bytes]()
            for event in events_of(data):
                out.append(event if within else self._edited(event))
                within = False
            data = b"".join(out)
        self.note()
        self.within_event = self.inner.within_event
        self.usage = _counted(self.usage, self._split)
        return data

    def _edited(self, event: bytes) -> bytes:
        name = name_of(event)
        if self._editor.silent and name.startswith("content_block_"):
            return b""
        if len(event) > MAX_PARSED_EVENT:
            return event
        try:
            if name == "message_start":
                return self._editor.begun(event, self._counts)
            if name == "message_delta":
                event, usage = self._editor.ended(event, self._counts)
                self._split = usage or self._split
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            pass  # an event of another shape passes unchanged
        return event


def _counted(usage: Usage | None, split_usage: Usage | None) -> Usage | None:
    """The metered usage: the engine's counts, with the split of the written tokens."""
    if usage is None or split_usage is None:
        return usage
    return Usage(usage.prompt, usage.completion, usage.cached, split_usage.written, split_usage.hours)
