"""The usage of a plain answer (JSON, not a stream). Pure.

An answer of up to MAX_HELD_ANSWER bytes is read whole before any of it goes to the client, so that another replica can answer
if this one fails. Of a larger one the beginning is read and judged; then it is passed on as it comes, and never held whole. The
usage of an answer that is too large to be parsed is looked for in its last TAIL bytes: engines write it behind the choices.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from gateway.errors import ReplicaFailure
from gateway.metering import Usage, parse_usage

MAX_HELD_ANSWER: Final = 1 << 20  # bytes
MAX_PARSED_ANSWER: Final = 256 << 10  # bytes; what a larger one holds could stop the event loop
TAIL: Final = 64 << 10  # bytes

_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')


def usage_of(body: bytes) -> Usage | None:
    """The usage in a whole answer. Raises ReplicaFailure if the answer is no JSON object: no engine says such a thing."""
    if len(body) > MAX_PARSED_ANSWER:
        _require_object(body)
        if not body[-64:].rstrip().endswith(b"}"):
            raise ReplicaFailure("garbage", "the answer is no JSON object")
        return _usage_in(body[-TAIL:])
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return parse_usage(answer)


class UsageTail:
    """The last bytes of a large answer that is passed on as it comes. `feed` all of it but the beginning, then ask for `usage`.

    At most 2 * TAIL bytes are held. O(bytes).
    """

    __slots__ = ("_tail",)

    def __init__(self, begin: bytes) -> None:
        """begin: the first bytes of the answer. Raises ReplicaFailure if they are not the beginning of a JSON object."""
        _require_object(begin)
        self._tail = bytearray(begin[-TAIL:])

    def feed(self, data: bytes) -> None:
        self._tail += data[-TAIL:]
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]

    def usage(self) -> Usage | None:
        """None: there is none in the last TAIL bytes."""
        return _usage_in(bytes(self._tail[-TAIL:]))


def _require_object(begin: bytes) -> None:
    if not begin[:64].lstrip().startswith(b"{"):
        raise ReplicaFailure("garbage", "the answer is no JSON object")


def _usage_in(tail: bytes) -> Usage | None:
    found = _USAGE.findall(tail)
    try:
        return parse_usage({"usage": orjson.loads(found[-1])}) if found else None
    except orjson.JSONDecodeError:
        return None
