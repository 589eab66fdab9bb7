"""Answers as they came over a connection, and whether one with status 200 is complete.

Complete: all bytes that its framing announces have come, its JSON can be parsed, every answer in it says why it ended, and a
stream has the last event of its API (which may be an error).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tests.replica.fuzz.bodies import CHAT, COMPLETION

DONE: Final = "[DONE]"


class Reply(NamedTuple):
    """An answer. status: 0 if there is none, -1 if the client has left. body: without its framing. events: it is a stream of
    events. lacking: what its framing announces and did not come, empty if nothing.
    """

    status: int
    body: bytes
    events: bool = False
    lacking: str = ""

    @classmethod
    def of(cls, data: bytes) -> Reply:
        """From all that came over a connection that was to be closed behind it. O(bytes)."""
        head, blank, rest = data.partition(b"\r\n\r\n")
        if not blank or not head.startswith(b"HTTP/1.1 "):
            return cls(0, data)
        names = (line.partition(b":") for line in head.lower().split(b"\r\n")[1:])
        headers = {name.strip(): value.strip() for name, _, value in names}
        body, lacking = _unframed(headers, rest)
        return cls(int(head[9:12]), body, headers.get(b"content-type", b"").startswith(b"text/event-stream"), lacking)


def _unframed(headers: Mapping[bytes, bytes], rest: bytes) -> tuple[bytes, str]:
    """The body, and what it lacks."""
    if headers.get(b"transfer-encoding") == b"chunked":
        return _dechunked(rest)
    length = headers.get(b"content-length")
    if length is None:
        return rest, "neither Content-Length nor chunks"
    return rest, "" if len(rest) == int(length) else f"{len(rest)} of {int(length)} bytes"


def _dechunked(rest: bytes) -> tuple[bytes, str]:
    parts, at = list[bytes](), 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        if not size:
            return b"".join(parts), "" if rest[end:] == b"\r\n\r\n" else "not the end of the last chunk"
        at = end + 2 + size + 2
        if rest[at - 2 : at] != b"\r\n":
            break
        parts.append(rest[end + 2 : at - 2])
    return b"".join(parts), "the last chunk"


def missing(path: str, reply: Reply) -> str:
    """What a reply with status 200 lacks to be complete, empty if nothing. O(body)."""
    if reply.lacking:
        return reply.lacking
    try:
        if reply.events:
            return "" if STREAMED[path](_data(reply.body)) else f"its end: {reply.body[-200:]!r}"
        return "" if WHOLE[path](json.loads(reply.body)) else f"something of {reply.body[-200:]!r}"
    except (ValueError, KeyError, TypeError) as error:
        return f"its API's form: {error!r} in {reply.body[-200:]!r}"


def _data(body: bytes) -> list[str]:
    """The data of all events."""
    *events, rest = body.decode().split("\n\n")
    if rest:
        raise ValueError("an event without its end")
    lines = [event.rpartition("\n")[2] for event in events]
    if not all(line.startswith("data: ") for line in lines):
        raise ValueError("an event without data")
    return [line[6:] for line in lines]


def _chunks_end(data: list[str]) -> bool:
    """A chat's or a completion's: there is an error, or each choice has ended; then [DONE]."""
    *events, last = data
    chunks = [json.loads(event) for event in events]
    if last != DONE or not chunks:
        return False
    return "error" in chunks[-1] or _choices_end([choice for chunk in chunks for choice in chunk["choices"]])


def _choices_end(choices: list[dict[str, Any]]) -> bool:
    ends = {choice["index"]: choice["finish_reason"] for choice in choices}
    return bool(ends) and all(ends.values())


def _last_is(*kinds: str) -> Callable[[list[str]], bool]:
    return lambda data: [json.loads(event)["type"] for event in data][-1:] in [[kind] for kind in kinds]


STREAMED: Final[Mapping[str, Callable[[list[str]], bool]]] = {
    CHAT: _chunks_end,
    COMPLETION: _chunks_end,
    "/v1/messages": _last_is("message_stop", "error"),
    "/v1/responses": _last_is("response.completed", "response.incomplete", "response.failed"),
}
WHOLE: Final[Mapping[str, Callable[[dict[str, Any]], bool]]] = {
    CHAT: lambda body: _choices_end(body["choices"]) and body["usage"]["total_tokens"] > 0,
    COMPLETION: lambda body: _choices_end(body["choices"]) and body["usage"]["total_tokens"] > 0,
    "/v1/messages": lambda body: bool(body["stop_reason"]) and body["usage"]["output_tokens"] >= 0,
    "/v1/messages/count_tokens": lambda body: body["input_tokens"] >= 0,
    "/v1/responses": lambda body: body["status"] in ("completed", "incomplete") and body["usage"]["output_tokens"] >= 0,
    "/v1/responses/input_tokens": lambda body: body["input_tokens"] >= 0,
    "/tokenize": lambda body: body["count"] == len(body["tokens"]),
    "/detokenize": lambda body: isinstance(body["prompt"], str),
}
