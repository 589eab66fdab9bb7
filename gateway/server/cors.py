"""CORS where aiohttp writes the answer: preflights, and the headers of what the gateway answers by itself.

Only for the API's paths, never for operators' endpoints. What comes from replicas: `request/delivery.py`.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from gateway.admission.cors import ALLOW_ORIGIN, answer_headers, preflight_headers
from gateway.config.live import Live
from gateway.dialects.table import ENGINES_OWN

_ENGINES_OWN: Final = frozenset(ENGINES_OWN)
_METHOD, _HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"


def preflight(request: web.Request, live: Live) -> web.Response | None:
    """The answer to a preflight; None: it is none, or CORS is off. Raises GatewayError 403."""
    origin = request.headers.get("Origin")
    if request.method != "OPTIONS" or not live.cors_origins or not origin or _METHOD not in request.headers:
        return None
    names = ",".join(request.headers.getall(_HEADERS, ()))
    return web.Response(status=204, headers=preflight_headers(live.cors_origins, origin, names))


def finish(request: web.Request, response: web.StreamResponse, live: Live) -> None:
    """Add what the browser looks at, if the answer does not have it yet."""
    path = request.path
    if not live.cors_origins or not (path.startswith("/v1/") or path in _ENGINES_OWN) or ALLOW_ORIGIN in response.headers:
        return
    for name, value in answer_headers(live.cors_origins, request.headers.get("Origin")):
        response.headers.add(name, value)
