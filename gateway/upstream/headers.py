"""Header forwarding: a client's request headers to the replica, a replica's answer headers to the client.

Only hop-by-hop headers (RFC 9110, section 7.6.1), headers that the gateway sets itself, and headers that steer engines are
dropped; the others are forwarded byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gateway.upstream.http1 import AnswerHead, lines
from gateway.upstream.locations import relative

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    [b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer"]
) | {b"transfer-encoding", b"upgrade"}
# They choose a cache of an engine, or its order of requests, or make a sidecar of llm-d connect to a host.
_STEERING: Final = frozenset(
    [b"x-data-parallel-rank", b"x-data-parallel-host-port", b"x-prefiller-host-port", b"x-kv-cache-source-host-port"]
) | {b"x-encoder-hosts-ports", b"x-vllm-priority"}
# Set by the gateway for the replica. Answers must be uncompressed: the usage in them is read.
_REQUEST_OWN: Final = (
    _HOP_BY_HOP.union([b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect", b"x-request-id"])
    | {b"x-warmroute-admin-key", b"x-warmroute-via", b"prompt-log"}
    | _STEERING
)
_ENCODED_OWN: Final = _REQUEST_OWN - {b"content-encoding"}
_ANSWER_OWN: Final = _HOP_BY_HOP | {b"date", b"server", b"content-length", b"x-request-id", b"request-id", b"prompt-log"}
_LOCATIONS: Final = frozenset([b"location", b"content-location"])
# The gateway's own headers, and CORS headers, which a replica must not set.
_ANSWER_PREFIXES: Final = (b"x-warmroute-", b"access-control-")
_COMMON_TOKENS: Final = frozenset([b"", b"close", b"keep-alive"])  # of a Connection header; they name no other header


class Address(NamedTuple):
    """The parts of a replica's base URL."""

    host: str
    port: int
    tls: bool
    netloc: str  # for the Host header
    path: str  # prefix of every request's path


def parse_address(base_url: str) -> Address:
    """base_url: validated by `config`."""
    parts = urlsplit(base_url)
    tls = parts.scheme == "https"
    return Address(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc, parts.path)


def upstream_headers(headers: Iterable[tuple[bytes, bytes]], *, encoded: bool = False) -> bytes:
    """A client's headers as lines for a replica. encoded: the body is forwarded in its original Content-Encoding."""
    return lines(_without(headers, _ENCODED_OWN if encoded else _REQUEST_OWN)) + b"Accept-Encoding: identity\r\n"


def with_bearer(headers: bytes, key: str) -> bytes:
    """Header lines for a server that reads keys as OpenAI's servers do, from a client that sends its key as Anthropic's clients
    do.
    """
    return b"%bAuthorization: Bearer %b\r\n" % (headers, key.encode("latin-1", "replace"))


def downstream_headers(head: AnswerHead, address: Address) -> bytes:
    """A replica's headers as lines for the client, without the body's framing and the gateway's own headers.

    address: of the replica. Heads are cached and shared between replicas, so they store only lines that do not depend on the
    address.
    """
    fields = head.fields
    if fields.downstream_lines is None:
        kept = [pair for pair in _without(fields.headers, _ANSWER_OWN) if not pair[0].startswith(_ANSWER_PREFIXES)]
        fields.locations = [pair for pair in kept if pair[0] in _LOCATIONS]
        fields.downstream_lines = lines([pair for pair in kept if pair[0] not in _LOCATIONS])
    if not fields.locations:
        return fields.downstream_lines
    _, _, tls, netloc, path = address
    return fields.downstream_lines + lines(
        [(name, relative(value, tls=tls, netloc=netloc, path=path)) for name, value in fields.locations]
    )


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    """All headers except `names` and headers listed by a Connection header."""
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
