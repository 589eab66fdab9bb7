"""What of a client's request goes to a replica, and whether it may go there twice."""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_intdigest

from gateway.body import UNKNOWN, coding_of, lease_of
from gateway.exchange import Exchange, Headers, Request
from gateway.loops import VIA_HEADER
from gateway.plain import PlainRequest
from gateway.record import TENANT_HEADER
from gateway.relay import Call, onward

_IDEMPOTENT: Final = frozenset(["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])  # RFC 9110, section 9.2.2


def call_of(exchange: Exchange, body: bytes) -> Call:
    request = exchange.request
    headers = b"%bX-Request-Id: %b\r\n" % (_onward(request), exchange.record.id.encode("ascii"))
    via = request.headers.get(VIA_HEADER)
    return Call(request.method, _path(request), headers, body, repeatable=_is_repeatable(exchange), via=via)


def address_of(request: Request) -> str:
    """What tells clients apart that may lie about everything else: their address, of IPv6 the /64 network."""
    return lease_of(request).account.client


def client_of(request: Request) -> int:
    """A number that tells clients apart, the same in all workers: of its key and tenant, without either of its address.

    O(1) for a plain request whose head was seen before. Where nobody checks keys, a client may pass for several.
    """
    if not isinstance(request, PlainRequest):
        return _number_of(request.headers) or xxh3_64_intdigest(lease_of(request).account.client.encode())
    head = request.head
    if head.client is None:
        head.client = _number_of(head.fields)
    return head.client or xxh3_64_intdigest(request.lease.account.client.encode())


def _number_of(headers: Headers) -> int:
    """0: they name nobody."""
    key, tenant = headers.get("Authorization"), headers.get(TENANT_HEADER)
    return xxh3_64_intdigest(f"{key}\0{tenant}".encode("utf-8", "surrogatepass")) if key or tenant else 0


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
