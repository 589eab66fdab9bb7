"""Looks at each request, compiled: nearly all have no header, and another path."""

from __future__ import annotations

from typing import Final

from gateway.features.prompt_log.header import HEADER
from gateway.features.prompt_log.log_request import FORMS_BY_PATH, LOG_REQUEST
from gateway.features.prompt_log.once.request import OnceRequest
from gateway.request.client import InternalRequest
from gateway.request.exchange import Exchange
from gateway.server.http.request_head import HeaderFields

_NAME: Final = HEADER.lower().encode("ascii")
_ENDPOINTS: Final = "/v1/logs"


def has_header(exchange: Exchange) -> bool:
    """True if the request has the header, on a path where it counts. Runs in the background and messages of a WebSocket have
    the headers of another request.
    """
    request = exchange.request
    headers = request.headers
    # Nearly all requests end here: `get` would take three times as long, because it caches its result.
    if _NAME not in headers.raw if isinstance(headers, HeaderFields) else headers.get(HEADER) is None:
        return False
    own = not isinstance(request, InternalRequest) or isinstance(request, OnceRequest)
    return own and request.path in FORMS_BY_PATH and request.opened_by is None


def header_of(exchange: Exchange) -> str:
    """All lines of the header as one."""
    headers = exchange.request.headers
    return headers.joined(HEADER) if isinstance(headers, HeaderFields) else headers.get(HEADER) or ""


def may_have_token(exchange: Exchange) -> bool:
    """True if the request may have a token of `once`, and is no generation itself."""
    if not has_header(exchange) or isinstance(exchange.request, OnceRequest):
        return False
    return "once" in header_of(exchange)


def in_background(exchange: Exchange) -> bool:
    """True if the request starts a run in the background, and has the header."""
    return exchange.dialect.in_background and bool(exchange.api.stores) and has_header(exchange)


def is_endpoint(exchange: Exchange) -> bool:
    """True for the path of an endpoint of logs, or below it."""
    return not exchange.api.metered and exchange.record.path.startswith(_ENDPOINTS)


def is_named(exchange: Exchange) -> bool:
    """True if an earlier phase has found wishes in the header."""
    slots = exchange.record.slots  # nearly all requests have none
    return slots is not None and LOG_REQUEST in slots
