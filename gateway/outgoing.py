"""What of a client's request goes to a replica, and whether it may go there twice."""

from __future__ import annotations

from typing import Final

from gateway.body import UNKNOWN, coding_of
from gateway.exchange import Exchange, Request
from gateway.plain import PlainRequest
from gateway.record import TENANT_HEADER
from gateway.relay import Call, onward

_IDEMPOTENT: Final = frozenset(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])  # RFC 9110, section 9.2.2


def call_of(exchange: Exchange, body: bytes) -> Call:
    request = exchange.request
    headers = b"%bX-Request-Id: %b\r\n" % (_onward(request), exchange.record.id.encode("ascii"))
    return Call(request.method, _path(request), headers, body, repeatable=_is_repeatable(exchange))


def client_of(request: Request) -> int:
    """A hash that tells clients apart: by their key, else by their tenant, else by their address."""
    headers = request.headers
    if name := headers.get("Authorization") or headers.get(TENANT_HEADER):
        return hash(name)
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return hash(peer[0] if isinstance(peer, tuple) else peer)


def _is_repeatable(exchange: Exchange) -> bool:
    """Whether the request may be sent again after it may have reached a replica."""
    method, api = exchange.request.method, exchange.api
    if method == "POST":
        return api.metered or (api.repeatable and api.keeps_nothing(exchange.record.path))
    return method in _IDEMPOTENT


def _onward(request: Request) -> bytes:
    """Its header lines as they go to a replica."""
    if not isinstance(request, PlainRequest):
        return onward(request.raw_headers, encoded=coding_of(request) == UNKNOWN)
    head = request.head
    if head.onward is None:
        head.onward = onward(head.headers)
    return head.onward


def _path(request: Request) -> str:
    """The path with its query, as it came where that is plain."""
    raw = request.raw_path
    if isinstance(request, PlainRequest):
        return raw
    return raw if raw.startswith("/") and raw.isascii() and "#" not in raw else request.rel_url.raw_path_qs
