"""CORS: web pages of the configured origins (`*` for all; none by default) may read answers.

A browser asks first (a preflight: OPTIONS, with the method and headers of the request), and then checks the headers of the
answer. Requests carry their key in a header, not in a cookie, so credentials are not allowed, and any header may be sent. A
replica's CORS headers are dropped (`upstream/headers.py`), because it does not know the gateway's clients.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from gateway.config.addresses import address_of
from gateway.errors import GatewayError

ANY: Final = "*"
ALLOW_ORIGIN: Final = "Access-Control-Allow-Origin"
METHODS: Final = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
EXPOSED: Final = (  # headers that a page may read
    "X-Request-Id, Request-Id, Retry-After, X-Warmroute-Replica, X-Warmroute-Cached-Tokens,"
    " OpenAI-Processing-Ms, X-Should-Retry, Prompt-Log"
)
MAX_AGE_S: Final = 600  # for which a browser may cache a preflight
_NAME: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")  # of a Host header
_NAMES: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,2000}")  # names of headers, with commas


def answer_headers(origins: Collection[str], origin: str | None) -> list[tuple[str, str]]:
    """The CORS headers of an answer to a request of this origin (None: it names none)."""
    vary = [] if ANY in origins else [("Vary", "Origin")]
    allowed = _allowed(origins, origin)
    if not allowed:
        return vary
    return [(ALLOW_ORIGIN, allowed), ("Access-Control-Expose-Headers", EXPOSED), *vary]


def answer_lines(origins: Collection[str], origin: str | None) -> bytes:
    """`answer_headers` as lines of a head."""
    return "".join(f"{name}: {value}\r\n" for name, value in answer_headers(origins, origin)).encode("ascii")


def preflight_headers(origins: Collection[str], origin: str, headers: str) -> list[tuple[str, str]]:
    """The headers that answer a preflight. headers: names requested by the browser. Raises GatewayError 403 for another
    origin.
    """
    allowed = _allowed(origins, origin)
    if not allowed:
        raise origin_not_allowed()
    made = [(ALLOW_ORIGIN, allowed), ("Access-Control-Allow-Methods", METHODS), ("Access-Control-Max-Age", str(MAX_AGE_S))]
    if _NAMES.fullmatch(headers):
        made.append(("Access-Control-Allow-Headers", headers))
    made.append(("Vary", "Origin, Access-Control-Request-Headers"))
    return made


def require_origin(origins: Collection[str], origin: str | None) -> None:
    """Checks the origin of a WebSocket, to which browsers do not apply CORS: any web page that a user visits could open one,
    from the user's network. Raises GatewayError 403 for an origin that is not allowed. Programs send no origin.
    """
    if origin is not None and not _allowed(origins, origin):
        raise origin_not_allowed()


def is_rebound(origin: str, host: str) -> bool:
    """True if a page may have been loaded by the name in `host` from elsewhere, and the name then bound to this machine (DNS
    rebinding): its requests are of the same origin, or of the origin `null` if it wants no referrer (Fetch, "append a request
    Origin header"). Names of this machine and addresses cannot be bound anew, and with TLS the page would have no certificate.
    host: the Host header.
    """
    if origin.lower() not in ("null", f"http://{host}".lower()):
        return False
    name = (_NAME.fullmatch(host) or ("", host))[1].lower()
    return not (name == "localhost" or name.endswith(".localhost") or address_of(name))


def origin_not_allowed() -> GatewayError:
    return GatewayError(403, "origin_not_allowed", "The configuration (cors_origins) does not allow this web page's origin.")


def _allowed(origins: Collection[str], origin: str | None) -> str:
    """The value of the header that allows this origin; "" if it is not allowed."""
    if not origin:
        return ""
    if ANY in origins:
        return ANY
    return origin if origin in origins else ""
