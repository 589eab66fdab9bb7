"""Error responses outside of forwarded requests, in OpenAI's error format."""

from __future__ import annotations

from http import HTTPStatus

from gateway.dialects.openai.errors import error_body
from gateway.errors import GatewayError


def error_lines(error: GatewayError) -> bytes:
    """Header lines of an error."""
    return b"Content-Type: application/json\r\n" + error.retry_lines


def raw_response(error: GatewayError) -> bytes:
    """A whole response as bytes, with `Connection: close`."""
    body = error_body(error)
    start = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
    return b"%b%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (start, error_lines(error), len(body), body)
