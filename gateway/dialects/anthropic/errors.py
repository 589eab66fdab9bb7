"""Anthropic's error shape, in answers and in streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.events.named import name_of
from gateway.dialects.events.sse import data_of, object_of
from gateway.dialects.excerpt import one_line
from gateway.dialects.full_context import CODE, FullContext, full_context
from gateway.errors import GatewayError, ReplicaFailure

_LEAST_ROOM: Final = 4000  # tokens of an answer: with less room Claude Code does not ask for a shorter one, and the turn fails

_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Types of errors that the client caused: Anthropic's and, in the same shape, vLLM's.
_CLIENTS: Final = frozenset(_KINDS[status] for status in (401, 402, 403, 404, 409, 413, 429)) | {
    "invalid_request_error",
    "BadRequestError",
    "NotFoundError",
    "UnprocessableEntityError",
}


def error_body(error: GatewayError, request_id: str = "") -> bytes:
    """The body of an error. request_id: shown by clients; "" omits it."""
    told: dict[str, Any] = {"type": kind_of(error), "message": error.message}
    if error.members is not None:
        told |= {"code": error.code, **error.members}
    body: dict[str, Any] = {"type": "error", "error": told}
    if request_id:
        body["request_id"] = request_id
    return orjson.dumps(body)


def kind_of(error: GatewayError) -> str:
    """The type of an error in Anthropic's API."""
    return _KINDS.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")


def error_event(error: GatewayError) -> bytes:
    """The error as an event with a name, because clients ignore events without one."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def failure_of(event: bytes) -> ReplicaFailure | None:
    """The failure that an engine's error event reports; None if the client caused the error."""
    error = object_of(event).get("error") if name_of(event) == "error" else None
    if not isinstance(error, dict) or error.get("type") in _CLIENTS or full_context(data_of(event).strip()):
        return None
    return ReplicaFailure("status", f"its error: {one_line(str(error.get('message')))}")


def full_context_error(full: FullContext, request_id: str) -> bytes:
    """The error of Anthropic's API about a full context. Clients parse its sentences: at the first they compact, at the second
    they ask for a shorter answer.
    """
    prompt, most = full.prompt, full.most
    room = min(_LEAST_ROOM, most // 4) if full.output else 0
    if not most:
        text = f"prompt is too long: {full.message}"
    elif full.output and prompt + room < most:
        text = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {full.output} > {most}, "
            "decrease input length or `max_tokens` and try again"
        )
    else:
        text = f"prompt is too long: {max(prompt, most - room + 1)} tokens > {most - room} maximum"
    return error_body(GatewayError(400, CODE, text), request_id)
