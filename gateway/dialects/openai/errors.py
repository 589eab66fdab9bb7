"""OpenAI's error shape."""

from __future__ import annotations

import orjson

from gateway.errors import GatewayError


def error_body(error: GatewayError) -> bytes:
    return orjson.dumps(error_of(error))


def error_of(error: GatewayError) -> dict[str, dict[str, str | None]]:
    """The error object of OpenAI's API."""
    kind = "invalid_request_error" if error.fault == "client" else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
