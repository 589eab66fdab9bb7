"""Finds the token usage in a whole plain answer of any dialect.

An answer too large to be parsed is searched as text. Most engines write the usage behind the answer's text. vLLM writes it
before the token ids and log probabilities of the prompt, which may be megabytes. In the large last event of a stream, the usage
is within the last TAIL bytes.

A whole answer is passed on even if it cannot be read: it was computed, and its client may read it. Only what no engine gives is
refused: another body than an object, a cut one, an error with status 200.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import orjson

from gateway.dialects.answer_members import read_members
from gateway.dialects.dialect import AnswerTail
from gateway.dialects.excerpt import one_line
from gateway.dialects.lenient import BOM, read_json
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure

MAX_PARSED_ANSWER: Final = 256 << 10  # bytes; parsing a larger answer could block the event loop
TAIL: Final = 64 << 10  # bytes
_LONGEST: Final = 4 << 10  # bytes of a usage object, which may be cut by the border of two pieces

_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')

ParseUsage = Callable[[dict[str, Any]], Usage | None]
"""Reads the usage of a parsed answer from its member `usage`; None if it is missing or malformed."""


def usage_of(body: bytes, parse: ParseUsage) -> Usage | None:
    """The usage in a whole answer. Raises ReplicaFailure for an answer that no engine gives: anything but an object, or an
    error with status 200, which clients would read as an answer without content.
    """
    if len(body) <= MAX_PARSED_ANSWER:
        if (usage := _usual_usage(body, parse)) is not None:
            return usage
        try:
            answer = read_json(body)
        except ValueError:
            pass  # its client may read it
        else:
            return _usage_in_object(answer, parse)
    _require_object(body)
    if not body[-64:].rstrip().endswith(b"}"):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return usage_in(body, parse)


def _usual_usage(body: bytes, parse: ParseUsage) -> Usage | None:
    """The usage of nearly all answers; None: the whole answer is to be read."""
    try:
        members = read_members(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    usage = members.usage
    if members.error or members.object == "error" or members.type == "error" or not isinstance(usage, dict):
        return None
    return parse({"choices": [], "usage": usage})


def _usage_in_object(answer: Any, parse: ParseUsage) -> Usage | None:
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    if said := _error_in(answer):
        raise ReplicaFailure("status", f"answered 200 with its error: {one_line(said)}")
    return parse(answer)


def _error_in(answer: Mapping[str, Any]) -> str:
    """The message of an object that is an error; "" if it is none. (A failed response of the Responses API may have an error,
    too.)
    """
    error = answer.get("error")
    if answer.get("object", "error") != "error" or not (error or "error" in (answer.get("type"), answer.get("object"))):
        return ""
    holder = error if isinstance(error, dict) else answer
    message = error if isinstance(error, str) else holder.get("message")
    return message if isinstance(message, str) and message else "no message"


class UsageTail(AnswerTail):
    """Searches a large answer for its usage while it streams. Holds its last 2 * TAIL bytes at most. O(bytes)."""

    def __init__(self, begin: bytes, parse: ParseUsage) -> None:
        """begin: the first bytes of the answer. Raises ReplicaFailure if they are not the beginning of a JSON object."""
        _require_object(begin)
        self._tail = bytearray()
        self._parse = parse
        self._found: Usage | None = None
        self.feed(begin)

    def feed(self, data: bytes) -> None:
        for at in range(0, len(data), TAIL):
            self._tail += data[at : at + TAIL]
            if len(self._tail) > 2 * TAIL:
                self._look()
                del self._tail[:-_LONGEST]

    def usage(self) -> Usage | None:
        """The last valid usage; None if there was none."""
        self._look()
        return self._found

    def _look(self) -> None:
        self._found = usage_in(bytes(self._tail), self._parse) or self._found


def usage_in(text: bytes, parse: ParseUsage) -> Usage | None:
    """The last valid `usage` in a piece of JSON. Others are skipped: a tool's schema may have a property of that name.
    O(length).
    """
    found: list[bytes] = _USAGE.findall(text)
    for last in reversed(found):
        try:
            usage = parse({"choices": [], "usage": orjson.loads(last)})  # only answers with choices get here
        except orjson.JSONDecodeError:
            continue
        if usage:
            return usage
    return None


def _require_object(begin: bytes) -> None:
    if not begin[:64].removeprefix(BOM).lstrip().startswith(b"{"):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
