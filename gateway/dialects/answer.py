"""The usage in a whole plain answer, wherever its dialect has it.

The usage of an answer that is too large to be parsed is looked for in its last TAIL bytes: engines write it behind the answer's
text. So is that of a large event at the end of a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from gateway.dialects.dialect import AnswerTail
from gateway.dialects.excerpt import one_line
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure

MAX_PARSED_ANSWER: Final = 256 << 10  # bytes; what a larger one holds could stop the event loop
TAIL: Final = 64 << 10  # bytes

_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')

ParseUsage = Callable[[Mapping[str, Any]], Usage | None]
"""Reads the usage of an answer that has it as its member `usage`; None: it has none that makes sense."""


def usage_of(body: bytes, parse: ParseUsage) -> Usage | None:
    """The usage in a whole answer. Raises ReplicaFailure if the answer is no JSON object, for no engine answers so, or if it is
    an error: with status 200 clients take it for an answer without content.
    """
    if len(body) > MAX_PARSED_ANSWER:
        _require_object(body)
        if not body[-64:].rstrip().endswith(b"}"):
            raise ReplicaFailure("garbage", "the answer is no JSON object")
        return usage_in(body[-TAIL:], parse)
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    if said := _error_in(answer):
        raise ReplicaFailure("status", f"answered 200 with its error: {one_line(said)}")
    return parse(answer)


def _error_in(answer: Mapping[str, Any]) -> str:
    """What an object that is an error says; "": it is none. (A response may be a failed one, and have its error.)"""
    error = answer.get("error")
    if answer.get("object", "error") != "error" or not (error or "error" in (answer.get("type"), answer.get("object"))):
        return ""
    holder = error if isinstance(error, dict) else answer
    message = error if isinstance(error, str) else holder.get("message")
    return message if isinstance(message, str) and message else "no message"


class UsageTail(AnswerTail):
    """The last bytes of a large answer. At most 2 * TAIL bytes are held. O(bytes)."""

    def __init__(self, begin: bytes, parse: ParseUsage) -> None:
        """begin: the first bytes of the answer. Raises ReplicaFailure if they are not the beginning of a JSON object."""
        _require_object(begin)
        self._tail = bytearray(begin[-TAIL:])
        self._parse = parse

    def feed(self, data: bytes) -> None:
        self._tail += data[-TAIL:]
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]

    def usage(self) -> Usage | None:
        """None: there is none in the last TAIL bytes."""
        return usage_in(bytes(self._tail[-TAIL:]), self._parse)


def usage_in(text: bytes, parse: ParseUsage) -> Usage | None:
    """The last `usage` in a piece of JSON that makes sense: a tool's schema may have a property of that name. O(length)."""
    found: list[bytes] = _USAGE.findall(text)
    for last in reversed(found):
        try:
            usage = parse({"usage": orjson.loads(last)})
        except orjson.JSONDecodeError:
            continue
        if usage:
            return usage
    return None


def _require_object(begin: bytes) -> None:
    if not begin[:64].lstrip().startswith(b"{"):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
