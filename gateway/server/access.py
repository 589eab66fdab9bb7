"""Authorization of operators, who may see replicas, addresses and tenants, and use the operator endpoints.

With an admin key (WARMROUTE_ADMIN_KEY) an operator is a client that sends it. A client with the read-only key
(WARMROUTE_READ_KEY) may read at operator endpoints, and is no operator otherwise. Without an admin key, an operator is a client
on this machine with a direct connection. A proxy on this machine connects from the loopback address, too, so a request is not
direct if it carries a header that proxies add, has a Host other than this machine (a proxy that keeps its client's Host; DNS
rebinding of a web page's name to 127.0.0.1), uses HTTP/1.0 (nginx before 1.29.7 to its upstreams), or comes from a web page of
another origin. A proxy that hides all of this looks like a local client: such a setup needs the key.

Heads are judged once per distinct head (`request_head.RequestHead` is cached), addresses once per connection
(`connection.ClientConnection.local`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from gateway.config.addresses import is_loopback
from gateway.config.live import Live
from gateway.errors import GatewayError
from gateway.request.client import ClientRequest
from gateway.server.http.request import HttpRequest

KEY_HEADER: Final = "X-Warmroute-Admin-Key"

_PROXY_HEADERS: Final = (
    b"forwarded via x-forwarded x-forwarded-for x-forwarded-host x-forwarded-proto x-forwarded-port x-forwarded-server"
    b" x-forwarded-by x-forwarded-prefix x-forwarded-scheme x-forwarded-ssl x-forwarded-uri x-forwarded-method x-forwarded-user"
    b" x-forwarded-email x-forwarded-access-token x-forwarded-client-cert x-forwarded-path x-original-forwarded-for"
    b" x-original-host x-original-uri x-original-url x-real-ip x-real-port x-client-ip x-cluster-client-ip x-remote-addr"
    b" x-remote-ip x-proxyuser-ip x-host x-scheme x-envoy-external-address x-envoy-internal x-envoy-original-path"
    b" x-envoy-expected-rq-timeout-ms x-envoy-attempt-count x-amzn-trace-id x-amz-cf-id x-cloud-trace-context"
    b" x-azure-clientip x-azure-ref x-azure-fdid x-arr-log-id x-arr-ssl x-appengine-user-ip x-appengine-remote-addr"
    b" true-client-ip cf-connecting-ip cf-connecting-ipv6 cf-ray cf-visitor cf-ipcountry cdn-loop fastly-client-ip"
    b" fly-client-ip do-connecting-ip x-vercel-forwarded-for x-nf-client-connection-ip x-varnish surrogate-capability"
    b" proxy-connection ali-cdn-real-ip x-haproxy-server-state x-nginx-proxy x-traefik-router x-warmroute-via"
).split()
# Programs behind a proxy may read "_" as "-".
_FORWARDED: Final = frozenset(spelling for name in _PROXY_HEADERS for spelling in (name, name.replace(b"-", b"_")))
_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?")
_SAME_SITE: Final = frozenset([None, b"same-origin", b"none"])
_MAX_HOST: Final = 256


class Access:
    """Decides who is an operator (see the module). The keys are read once at start, `routing.expose_headers` at
    each use.
    """

    __slots__ = ("_key", "_live", "_read_key")

    def __init__(self, live: Live) -> None:
        self._live = live
        self._key = live.config.admin_key.encode("utf-8", "surrogateescape")
        self._read_key = live.config.read_key.encode("utf-8", "surrogateescape")

    @property
    def guarded(self) -> bool:
        """True if there is an admin key."""
        return bool(self._key)

    def is_operator(self, request: ClientRequest) -> bool:
        """True if the request is an operator's. O(1) if its head is cached."""
        return self.shows_key(request) if self._key else is_direct(request)

    def shows_key(self, request: ClientRequest) -> bool:
        """True if the request carries the admin key; False if there is none. Under /v1/ `Authorization` is for the replicas."""
        return _same(_given(request, bearer=False), self._key)

    def require_operator(self, request: ClientRequest, *, reads: bool) -> None:
        """Check a request to an operator endpoint on the admin listener. reads: the read-only key suffices. Raises GatewayError
        401 or 403.
        """
        if self.guarded:
            given = _given(request, bearer=True)
            if _same(given, self._key):
                return
            if not _same(given, self._read_key):
                wanted = f"Send the admin key as 'Authorization: Bearer KEY' or '{KEY_HEADER}: KEY'."
                raise GatewayError(401, "invalid_admin_key", wanted)
            if not reads:
                raise GatewayError(403, "read_only_key", "This key may read only. A change needs WARMROUTE_ADMIN_KEY.")
        elif not self.is_operator(request):
            text = (
                "Without WARMROUTE_ADMIN_KEY operator endpoints answer direct clients on this machine only, and no web pages."
            )
            raise GatewayError(403, "forbidden", text)

    def sees_headers(self, request: ClientRequest) -> bool:
        """True if the answer may name its replica and the predicted cached tokens."""
        return self._live.shows_routing or self.is_operator(request)


def _given(request: ClientRequest, *, bearer: bool) -> str | None:
    """The key that a request carries."""
    given = request.headers.get(KEY_HEADER)
    if given is None and bearer:
        scheme, _, credentials = (request.headers.get("Authorization") or "").partition(" ")
        given = credentials if scheme.lower() == "bearer" else None
    return given


def _same(given: str | None, key: bytes) -> bool:
    """False if there is no key."""
    return given is not None and bool(key) and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key)


def is_direct(request: ClientRequest) -> bool:
    """True if a request comes from this machine and is addressed to it, without a proxy or a foreign web page."""
    request = request.opened_by or request
    if not isinstance(request, HttpRequest) or not request.connection.local:
        return False
    head = request.head
    if head.direct is None:
        head.direct = head.simple and fields_are_direct(head.fields.raw)
    return head.direct


def fields_are_direct(fields: Mapping[bytes, bytes]) -> bool:
    """`is_direct` of a head's fields, names in lower case."""
    if not _FORWARDED.isdisjoint(fields) or fields.get(b"sec-fetch-site") not in _SAME_SITE:
        return False
    host, origin = fields.get(b"host", b""), fields.get(b"origin")
    if origin is not None and origin not in (b"http://" + host, b"https://" + host):
        return False
    return len(host) <= _MAX_HOST and _names_loopback(host)


@lru_cache(maxsize=64)
def _names_loopback(host: bytes) -> bool:
    """True if a Host header names this machine. host: its value, with or without a port."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1].decode("latin-1"))
