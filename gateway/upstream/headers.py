"""Which headers go on: those of a client's request to a replica, those of a replica's answer to the client.

Dropped are only those that concern one connection or that we make anew (RFC 9110, section 7.6.1); the others go on as the bytes
that they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gateway.upstream.http1 import Head, lines
from gateway.upstream.locations import relative

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    [b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer"]
) | {b"transfer-encoding", b"upgrade"}
# Made anew for the replica. Answers must come uncompressed: the usage in them is read.
_REQUEST_OWN: Final = _HOP_BY_HOP.union(
    [b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect", b"x-request-id"]
) | {b"x-warmroute-admin-key", b"x-warmroute-via"}
_ENCODED_OWN: Final = _REQUEST_OWN - {b"content-encoding"}
_ANSWER_OWN: Final = _HOP_BY_HOP | {b"date", b"server", b"content-length", b"x-request-id"}
_LOCATIONS: Final = frozenset([b"location", b"content-location"])
_ANSWER_PREFIX: Final = b"x-warmroute-"  # the gateway's own headers: a replica's would be doubled, or believed
_COMMON_TOKENS: Final = frozenset([b"", b"close", b"keep-alive"])  # of a Connection header: they name no other header


class Address(NamedTuple):
    """A replica's base URL, taken apart."""

    host: str
    port: int
    tls: bool
    netloc: str  # for the Host header
    path: str  # before that of every request


def parse_address(base_url: str) -> Address:
    """Of a base URL that `config` let pass."""
    parts = urlsplit(base_url)
    tls = parts.scheme == "https"
    return Address(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc, parts.path)


def upstream_headers(headers: Iterable[tuple[bytes, bytes]], *, encoded: bool = False) -> bytes:
    """A client's headers as they go to a replica. encoded: the body goes in the Content-Encoding in which it came."""
    return lines(_without(headers, _ENCODED_OWN if encoded else _REQUEST_OWN)) + b"Accept-Encoding: identity\r\n"


def downstream_headers(head: Head, address: Address) -> bytes:
    """A replica's headers as they go to the client. The body's framing and the gateway's own headers are made anew.

    address: of the replica. The same head may have come from another one, too: only what depends on neither is kept with it.
    """
    fields = head.fields
    if fields.onward is None:
        kept = [pair for pair in _without(fields.headers, _ANSWER_OWN) if not pair[0].startswith(_ANSWER_PREFIX)]
        fields.locations = [pair for pair in kept if pair[0] in _LOCATIONS]
        fields.onward = lines([pair for pair in kept if pair[0] not in _LOCATIONS])
    if not fields.locations:
        return fields.onward
    _, _, tls, netloc, path = address
    return fields.onward + lines(
        [(name, relative(value, tls=tls, netloc=netloc, path=path)) for name, value in fields.locations]
    )


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    """All but those names, and those that a Connection header names."""
    kept, named = [], b""
    for pair in headers:
        name = pair[0].lower()
        if name not in names:
            kept.append(pair)
        elif name == b"connection":
            named += b"," + pair[1].lower()
    if named and (also := {token.strip() for token in named.split(b",")} - _COMMON_TOKENS):
        return [pair for pair in kept if pair[0].lower() not in also]
    return kept
