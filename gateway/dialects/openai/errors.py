"""OpenAI's error shape."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.full_context import CODE, FullContext
from gateway.errors import INSUFFICIENT_QUOTA, GatewayError

_TOO_MANY: Final = 429
_LIMITED: Final = "rate_limit_error"


def error_body(error: GatewayError) -> bytes:
    return orjson.dumps(error_of(error))


def error_of(error: GatewayError) -> dict[str, dict[str, Any]]:
    """The error object of OpenAI's API."""
    told = {"message": error.message, "type": _kind_of(error), "param": error.param, "code": error.code}
    return {"error": {**told, **error.members} if error.members else told}


def _kind_of(error: GatewayError) -> str:
    """The type. Some clients repeat a 429 by it, and OpenAI's own is the code for a spent budget."""
    if error.status == _TOO_MANY:
        return INSUFFICIENT_QUOTA if error.code == INSUFFICIENT_QUOTA else _LIMITED
    return "invalid_request_error" if error.fault == "client" else "server_error"


def event_error_of(error: GatewayError) -> dict[str, dict[str, Any]]:
    """`error_of` for an event of a stream, whose head has said 200."""
    return {"error": {**error_of(error)["error"], "status": error.status}}


def full_context_error(full: FullContext, body: bytes) -> bytes:
    """An engine's error with the code by which clients recognize a full context. Its message and its other members stay."""
    answer: Any = orjson.loads(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):  # SGLang, TGI and Ollama write other shapes
        answer, error = {}, {"message": full.message, "param": None}
    return orjson.dumps({**answer, "error": {**error, "type": "invalid_request_error", "code": CODE}})
