"""Error responses outside of forwarded requests, in OpenAI's error format."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from gateway.dialects.openai.errors import error_body
from gateway.errors import GatewayError


def error_response(error: GatewayError) -> web.Response:
    headers = {"Server": "warmroute"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return web.Response(status=error.status, body=error_body(error), content_type="application/json", headers=headers)


def last_response(error: GatewayError) -> web.Response:
    """An error after which the connection ends: the rest of the request may or may not come."""
    answer = error_response(error)
    answer.force_close()
    return answer


def raw_response(error: GatewayError) -> bytes:
    """A whole response as bytes, with `Connection: close`."""
    body = error_body(error)
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if error.retry_after_s is not None:
        head.append(f"Retry-After: {error.retry_after_s}")
    return "\r\n".join((*head, "", "")).encode("ascii") + body
