"""The identity of a request: its caller, its target, its body, and its headers for the replica. Pure.

`Prompt-Log` counts, because it changes the replica's request. Headers that clients change in a repetition, or proxies on its
way, do not count, nor do names of conversations, which are for the gateway. Codex writes the members of `client_metadata`, the
end of its body, in another order when it repeats a stream, so that order does not count.
"""

from __future__ import annotations

from typing import Final

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from gateway.request.client import SESSION_HEADERS, WEAK_SESSION_HEADER
from gateway.request.exchange import Exchange

_UNCOUNTED: Final = frozenset(
    [
        *(name.lower().encode("ascii") for name in (*SESSION_HEADERS, WEAK_SESSION_HEADER)),
        *(b"authorization", b"x-api-key"),  # a part of the caller
        *(b"user-agent", b"traceparent", b"tracestate", b"baggage", b"b3", b"sentry-trace", b"uber-trace-id"),
        *(b"forwarded", b"via", b"x-real-ip", b"x-amzn-trace-id", b"x-cloud-trace-context", b"cf-ray", b"x-request-start"),
        b"x-request-timeout",
    ]
)
# Their SDKs count repetitions in one of the first.
_UNCOUNTED_PREFIXES: Final = (b"x-stainless-", b"x-forwarded-", b"x-envoy-", b"x-b3-", b"x-datadog-", b"x-codex-")

_RESPONSES: Final = "responses"  # name of its dialect
_METADATA: Final = b'"client_metadata":'
_MOST_METADATA: Final = 16 << 10  # bytes

Identity = int
"""A digest of caller, target, body and headers: the same for the same request, and of one size."""


def identity_of(exchange: Exchange, digest: int) -> Identity:
    """digest: of the body, by a secret seed. O(headers)."""
    request = exchange.request
    texts = caller_of(exchange), request.target, request.headers.get("Prompt-Log") or ""
    parts = [*(text.encode("utf-8", "surrogatepass") for text in texts), *_counted(request.upstream_headers())]
    return xxh3_128_intdigest(b"\0".join(parts), digest)  # no header has a NUL


def digest_of(exchange: Exchange, seed: int) -> int:
    """The digest of the request's body; the order of Codex's metadata does not count. O(body)."""
    body = exchange.api.body
    if exchange.dialect.name == _RESPONSES and (at := body.rfind(_METADATA, -_MOST_METADATA)) >= 0:
        try:
            end = orjson.dumps(orjson.loads(body[at + len(_METADATA) : -1]), option=orjson.OPT_SORT_KEYS)
            return xxh3_64_intdigest(end, xxh3_64_intdigest(body[:at], seed))
        except orjson.JSONDecodeError:  # it is not the end
            pass
    return xxh3_64_intdigest(body, seed)


def caller_of(exchange: Exchange) -> str:
    """The sender: by its key, or without keys by its credentials, its tenant and its address."""
    caller, key = exchange.caller, exchange.record.sender.key
    if caller.grant is not None and key:
        return f"key {key} of {caller.tenant}"
    return f"{caller.key:x} of {caller.tenant} at {exchange.request.lease.account.client}"


def _counted(lines: bytes) -> tuple[bytes, ...]:
    kept = list[bytes]()
    for line in lines.split(b"\r\n"):
        name = line.partition(b":")[0].lower()
        if line and name not in _UNCOUNTED and not name.startswith(_UNCOUNTED_PREFIXES):
            kept.append(line)
    return tuple(kept)
