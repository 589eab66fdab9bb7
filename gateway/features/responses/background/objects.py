"""Response objects made by the gateway for a background run, until or instead of an engine's object.

    queued ──► in_progress ──► completed, incomplete: the engine's object
       └────────────┴────────► failed, cancelled: this object

It repeats the same members of the request as OpenAI's objects, if they are short. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Members, apply, read_object
from gateway.features.histories.history import CONVERSATION, PREVIOUS, History
from gateway.features.histories.records import QUEUED

MAX_REPEATED: Final = 64 << 10  # bytes per repeated member
MAX_MESSAGE: Final = 1000  # characters of an error's message

# Repeated members of the request, and their defaults.
_REPEATED: Final[Mapping[str, bytes]] = {
    "instructions": b"null",
    "max_output_tokens": b"null",
    "max_tool_calls": b"null",
    "metadata": b"{}",
    "model": b'""',
    "parallel_tool_calls": b"true",
    "reasoning": b"null",
    "service_tier": b"null",
    "temperature": b"null",
    "text": b'{"format":{"type":"text"}}',
    "tool_choice": b'"auto"',
    "tools": b"[]",
    "top_p": b"null",
    "truncation": b'"disabled"',
    "user": b"null",
}
# Codes of failed responses known to clients.
_KNOWN: Final = frozenset(["server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded"])


def queued_object(id_: str, created_at: int, history: History, model: str) -> bytes:
    """The object that the client gets at once. model: the model's own name, also if the client has used an alias, as in all
    answers.
    """
    members = history.members
    head: dict[str, Any] = {
        "id": id_,
        "object": "response",
        "created_at": created_at,
        "status": QUEUED,
        "background": True,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "store": True,
        PREVIOUS: history.previous or None,
    }
    if history.conversation:
        head[CONVERSATION] = {"id": history.conversation}
    rest = {name: _repeated(members, name, default) for name, default in _REPEATED.items()}
    rest["model"] = orjson.dumps(model)
    return orjson.dumps(head)[:-1] + b"".join(b',"%b":%b' % (name.encode(), value) for name, value in rest.items()) + b"}"


def in_state(response: bytes, status: str, error: Mapping[str, str] | None = None) -> bytes:
    """An object of `queued_object` with another status."""
    values = {"status": orjson.dumps(status), "error": orjson.dumps(error)}
    return apply(response, read_object(response).put_all(values))


def error_in(status: int, message: str, code: object = None) -> dict[str, str]:
    """The error of a failed response. status, message, code: of the answer to its request."""
    of_status = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if 400 <= status < 500 else "server_error"
    return {"code": code if isinstance(code, str) and code in _KNOWN else of_status, "message": message[:MAX_MESSAGE]}


def in_background(response: bytes) -> bool:
    """True if a stored object belongs to a background run. O(length)."""
    span = read_object(response).spans.get("background")
    return span is not None and response[span[0] : span[1]] == b"true"


def _repeated(members: Members, name: str, default: bytes) -> bytes:
    span = members.spans.get(name)
    if span is None or span[1] - span[0] > MAX_REPEATED or members.raw[span[0] : span[1]] == b"null":
        return default
    return members.raw[span[0] : span[1]]
