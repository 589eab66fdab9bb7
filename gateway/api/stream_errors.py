"""How a client learns that a stream has broken off: an error event, in the form of the API that the path belongs to.

    /v1/chat/completions, /v1/completions   data: {"error": ...}, then data: [DONE], as vLLM does
    /v1/messages                            event: error, Anthropic's form; its clients ignore an event without a name
    /v1/responses, and below it             event: error, OpenAI's form, with the next sequence number
    any other path                          no event: its clients need not know one of these, so the connection is cut

Official clients raise each of them. Only the first kind has a [DONE]. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.api.openai import OTHER, error_body, error_of, kind_of
from gateway.errors import GatewayError

MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"

_NUMBER_NAME: Final = b'"sequence_number"'
_NUMBER: Final = re.compile(rb'"sequence_number"\s{0,8}:\s{0,8}(\d{1,15})')


def stream_error(path: str, error: GatewayError, last_number: int = -1) -> bytes | None:
    """What ends a stream that began on this path; None: nothing does, the connection is to be cut.

    last_number: of the event that went out last, for a stream whose events are numbered.
    """
    if kind_of(path) != OTHER:
        return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"
    if path == MESSAGES:
        kind = "overloaded_error" if error.status == 503 else "api_error"
        return _named_error({"error": {"type": kind, "message": error.message}})
    if is_numbered(path):
        # `error` is what OpenAI's servers send and its clients raise; the flat fields are those of its documentation.
        flat = {"code": error.code, "message": error.message, "param": error.param}
        return _named_error({**flat, "sequence_number": last_number + 1, **error_of(error)})
    return None


def is_numbered(path: str) -> bool:
    """Whether the events on this path are numbered: those of the Responses API are."""
    return path == RESPONSES or path.startswith(f"{RESPONSES}/")


def number_in(events: bytes, before: int) -> int:
    """The number of the last of these events that has one, else `before`. Within a text the quotes are escaped. O(length)."""
    at = events.rfind(_NUMBER_NAME)
    found = _NUMBER.match(events, at) if at >= 0 else None
    return int(found[1]) if found else before


def _named_error(data: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + orjson.dumps({"type": "error", **data}) + b"\n\n"
