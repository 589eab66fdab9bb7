"""OpenAI's error shape."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.full_context import CODE, FullContext
from gateway.errors import GatewayError

_TOO_MANY: Final = 429
_LIMITED: Final = "rate_limit_error"


def error_body(error: GatewayError) -> bytes:
    return orjson.dumps(error_of(error))


def error_of(error: GatewayError) -> dict[str, dict[str, Any]]:
    """The error object of OpenAI's API."""
    kind = "invalid_request_error" if error.fault == "client" else "server_error"
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": {**told, **error.members} if error.members else told}


def event_error_of(error: GatewayError) -> dict[str, dict[str, Any]]:
    """`error_of` for an event of a stream, whose head has said 200. Some clients repeat a 429 by its type."""
    told = {**error_of(error)["error"], "status": error.status}
    of_replica = error.members is not None and "type" in error.members
    if error.status == _TOO_MANY and not error.permanent and not of_replica:
        told["type"] = _LIMITED
    return {"error": told}


def full_context_error(full: FullContext, body: bytes) -> bytes:
    """An engine's error with the code by which clients recognize a full context. Its message and its other members stay."""
    answer: Any = orjson.loads(body)
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):  # SGLang, TGI and Ollama write other shapes
        answer, error = {}, {"message": full.message, "param": None}
    return orjson.dumps({**answer, "error": {**error, "type": "invalid_request_error", "code": CODE}})
