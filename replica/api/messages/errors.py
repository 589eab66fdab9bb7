"""Errors in Anthropic's shape. Clients parse the sentences about the context, so these are in Anthropic's words."""

from collections.abc import Mapping
from typing import Any

from replica.api.prepare import ContextError
from replica.api.validation import ApiError

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, name: str | None = None) -> dict[str, Any]:
    """The body of an error response, or of an event; `name`: the request's id."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    body: dict[str, Any] = {"type": "error"}
    body["error"] = {"type": TYPES.get(error.status, fallback), "message": _message(error)}
    return body if name is None else body | {"request_id": name}


def _message(error: ApiError) -> str:
    if not isinstance(error, ContextError):
        return error.message
    if error.max_tokens is None:
        return f"prompt is too long: {error.tokens} tokens > {error.context - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.tokens} + {error.max_tokens} > {error.context}, "
        "decrease input length or `max_tokens` and try again"
    )
