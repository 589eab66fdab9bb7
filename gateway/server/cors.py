"""CORS of the gateway's own endpoints: preflights, and the headers of their answers.

Only for the API's paths, never for operators' endpoints. CORS headers of replicas' answers: `request/delivery.py`.
"""

from __future__ import annotations

from typing import Final

from gateway.admission.cors import answer_lines, preflight_headers
from gateway.config.live import Live
from gateway.dialects.table import ENGINES_OWN
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response

_ENGINES_OWN: Final = frozenset(ENGINES_OWN)
_METHOD, _HEADERS = "Access-Control-Request-Method", "Access-Control-Request-Headers"


def preflight(request: HttpRequest, live: Live) -> Response | None:
    """The answer to a preflight; None: the request is none, or CORS is off. Raises GatewayError 403."""
    origin = request.headers.get("Origin")
    if request.method != "OPTIONS" or not live.cors_origins or not origin or _METHOD not in request.fields:
        return None
    headers = dict(preflight_headers(live.cors_origins, origin, request.fields.joined(_HEADERS)))
    return Response(status=204, content_type="", headers=headers)


def lines_of(request: HttpRequest, live: Live) -> bytes:
    """The CORS header lines of an answer."""
    if not live.cors_origins or not (request.path.startswith("/v1/") or request.path in _ENGINES_OWN):
        return b""
    return answer_lines(live.cors_origins, request.headers.get("Origin"))
