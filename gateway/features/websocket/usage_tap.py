"""Reads the tokens of a realtime session from the frames of its replica. Pure.

    frames ──► text messages that contain "response.done" ──► their usage, summed

`Boundaries` parses the frames. A message is searched in place; only a message from several reads or frames is copied, up to
MAX_EVENT bytes. An event's name appears literally in JSON; inside a string its quotes would be escaped. If a possible event
could not be read (compressed, masked, too long, without usage), `unread` is set. `take` has each answer since the last call.
`begun` is set while an answer has begun that has no such event yet; `passed` counts its events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.dialects.lenient import read_json
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage, bounded, token_count
from gateway.features.websocket.boundaries import CONTROLS, FrameTap

MAX_EVENT: Final = 1 << 18

_RESPONSE, _TRANSCRIPTION = "response.done", "transcription.done"  # OpenAI's, and vLLM's for transcription
_MARKS: Final = (b'"response.done"', b'"transcription.done"')
_BEGUN: Final = (b'.delta"', b'"response.created"')  # the ends of types of events, and a type
_LONGEST: Final = max(map(len, _MARKS)) - 1  # bytes of a mark that may be at the end of the previous piece
_TEXT: Final = 1
_FINAL, _RESERVED, _OPCODE, _MASKED = 0x80, 0x70, 0x0F, 0x80


class UsageTap(FrameTap):
    """One session. usage: the sum so far; None: none was reported. messages: called for each frame of a message."""

    def __init__(self, messages: Callable[[], None] = lambda: None) -> None:
        self.usage: Usage | None = None
        self.unread = False
        self.begun = False
        self.passed = 0
        self.last: Usage | None = None  # of the last answer
        self._messages = messages
        self._answers = list[Usage | None]()
        self._left = 0  # outstanding bytes of the current frame
        self._in_message = False  # a readable text message has begun
        self._reading = False  # the current frame is part of a readable message
        self._final = False  # and its last frame
        self._held = bytearray()  # the received parts of a message in several pieces
        self._searched: bytes | None = None  # the last bytes of a message that is too long to be held

    def frame(self, first: int, second: int, length: int, data: bytes, begin: int, end: int) -> None:
        self._left = length - (end - begin)
        opcode = first & _OPCODE
        if opcode >= CONTROLS:
            self._reading = False
            return
        self._messages()
        if opcode:  # a message begins
            readable = not (first & _RESERVED or second & _MASKED)
            self._in_message = opcode == _TEXT and readable
            if not readable:
                self._miss()
            self._held, self._searched = bytearray(), None
        if self._in_message and len(self._held) + length > MAX_EVENT:
            self._in_message = False
            self._searched, self._held = bytes(self._held), bytearray()
        self._reading, self._final = self._in_message or self._searched is not None, bool(first & _FINAL)
        self._piece(data, begin, end)

    def more(self, data: bytes, end: int) -> None:
        self._left -= end
        self._piece(data, 0, end)

    def lost(self) -> None:
        self._reading = False
        self._miss()

    def take(self) -> list[Usage | None]:
        """The answers since the last call: their usage; None: a possible answer could not be read."""
        answers, self._answers = self._answers, []
        return answers

    def leave(self, *, wanted: bool) -> bool:
        """The client leaves. True if it has a part of an answer, or has asked for one (wanted), which is counted like one
        without usage.
        """
        if not (self.begun or wanted):
            return False
        self._miss()
        return True

    def _miss(self) -> None:
        self.unread, self.begun = True, False
        self._answers.append(None)

    def known(self, sent: int) -> Usage:
        """The part of the present answer's usage that is known. sent: tokens that the client has sent since the last answer.
        A session's prompt begins with that of the last answer, and with this answer itself.
        """
        last = self.last
        before = 0 if last is None else last.prompt + last.completion
        return Usage(before + sent, self.passed, None if last is None else last.cached)

    def _piece(self, data: bytes, begin: int, end: int) -> None:
        if not self._reading:
            return
        if self._searched is not None:
            self._search(data, begin, end)
            return
        complete = self._final and not self._left
        if not (complete and not self._held):
            self._held += data[begin:end]
            if complete:
                held, self._held = bytes(self._held), bytearray()
                self._read(held, 0, len(held))
        else:
            self._read(data, begin, end)
        if complete:
            self._in_message = self._reading = False

    def _search(self, data: bytes, begin: int, end: int) -> None:
        """Searches a piece of a message that is too long to be held."""
        assert self._searched is not None
        text = self._searched + data[begin:end]
        if _marked(text, 0, len(text)):
            self._searched, self._reading = None, False
            self._miss()
        else:
            self._searched = text[-_LONGEST:]

    def _read(self, data: bytes, begin: int, end: int) -> None:
        """Reads a complete message."""
        if not _marked(data, begin, end):
            if any(data.find(mark, begin, end) >= 0 for mark in _BEGUN):
                self.passed = self.passed + 1 if self.begun else 0
                self.begun = True
            return
        try:
            event = read_json(data[begin:end])
        except ValueError:
            return
        kind = event.get("type") if isinstance(event, dict) else None
        if kind not in (_RESPONSE, _TRANSCRIPTION):
            return
        usage = usage_of(event.get("response") if kind == _RESPONSE else event)
        if usage is None or bounded(usage, None, 1, 0, turns=False) is not usage:
            self._miss()
        else:
            self.usage, self.begun, self.last = added(self.usage, usage), False, usage
            self._answers.append(usage)

    def __repr__(self) -> str:
        return f"<UsageTap {self.usage!r}{', unread' if self.unread else ''}>"


def usage_of(holder: object) -> Usage | None:
    """The `usage` of a response or event, in the format of realtime APIs or of chat. None: missing or invalid."""
    usage: Any = holder.get("usage") if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or not isinstance(usage, dict):
        return None
    if "input_tokens" not in usage:
        return parse_usage({"choices": [], "usage": usage})
    prompt, completion = token_count(usage.get("input_tokens")), token_count(usage.get("output_tokens"))
    if prompt is None or completion is None:
        return None
    cached = _cached(usage)
    return Usage(prompt, completion, None if cached is None else min(cached, prompt))


def added(before: Usage | None, usage: Usage) -> Usage:
    """The sum. Cached tokens are unknown if neither has them."""
    if before is None:
        return usage
    cached = None if before.cached is usage.cached is None else (before.cached or 0) + (usage.cached or 0)
    return Usage(before.prompt + usage.prompt, before.completion + usage.completion, cached, before.written + usage.written)


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("input_token_details")
    return token_count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _marked(data: bytes | bytearray, begin: int, end: int) -> bool:
    return data.find(_MARKS[0], begin, end) >= 0 or data.find(_MARKS[1], begin, end) >= 0
