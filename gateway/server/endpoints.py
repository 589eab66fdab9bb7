"""The endpoints of the clients' port and of the side listeners, and their servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.cors import ALLOW_ORIGIN
from gateway.admission.memory import Budget
from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.cluster.listener_tls import ListenerTls
from gateway.cluster.process import connection_limit
from gateway.config.live import Live
from gateway.dialects.table import ENGINES_OWN
from gateway.errors import GatewayError, too_many_connections
from gateway.request.client import ClientReply, ClientRequest
from gateway.request.lifecycle import Lifecycle
from gateway.request.running import RunningRequests
from gateway.server import cors
from gateway.server.actions import Actions
from gateway.server.http.connections import ClientServer
from gateway.server.http.request import HttpRequest
from gateway.server.models import Models
from gateway.server.operator import Operator
from gateway.server.routing import PARAMETER, Response, Route, Routes, any_method
from gateway.server.status import Status

ADMIN: Final = "admin"
SIDE_CONNECTIONS: Final = 256  # at once, on each side listener
SHUTDOWN_S: Final = 0.1  # for connections, after all requests are over

_API: Final = "the API is under /v1/."
_SIDE_PAGES: Final[Mapping[str, str]] = {
    ADMIN: "the admin listener (admin_listen) serves /warmroute/..., /metrics, /health and /ready; the API is on `listen`.",
    "metrics": "the metrics listener (metrics_listen) serves /metrics, /health and /ready; the API is on `listen`.",
}


Pages = Callable[[], list[Route]]
Endpoints = Callable[[Operator, LocalControl, ControlPlane], list[Route]]


class Sockets(Protocol):
    """Serves clients' WebSockets."""

    def wanted(self, request: HttpRequest) -> bool:
        """True if `serve` handles this request."""

    async def serve(self, request: HttpRequest) -> ClientReply:
        """Serve until the connection has ended, or another answer was given. Raises ConnectionError."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """The parts behind the endpoints. endpoints: for operators, from features. pages: of the admin listener only.
    sockets: makes the server of WebSockets, None without one. tls: of the listeners, None: without. memory, connections: limits
    on clients.
    """

    live: Live
    lifecycle: Lifecycle
    models: Models
    operator: Operator
    endpoints: list[Route]
    pages: list[Pages]
    sockets: Callable[[], Sockets] | None
    status: Status
    actions: Actions
    tls: ListenerTls | None
    running: RunningRequests
    memory: Budget
    connections: ConnectionLimit


def clients_runner(served: ServedParts) -> ClientServer:
    """The server on the clients' port."""
    forwarding = _ForwardingEndpoint(served)
    operators = _operator_routes(served)
    routes = [
        *operators,
        *served.status.routes(for_all=False),
        *served.models.routes(forwarding.serve),
        any_method("/v1/{path:.*}", forwarding.serve),
        *(any_method(path, forwarding.serve) for path in ENGINES_OWN),
    ]

    def refusal() -> GatewayError:
        return too_many_connections(connection_limit(served.live.config))

    routed = _routes(served, routes, _API, operators)
    return _server(served, routed.serve, served.lifecycle.serve, served.connections, refusal, tls=served.tls)


def side_runner(served: ServedParts, name: str) -> ClientServer:
    """The server on the listener for operators (ADMIN) or for Prometheus ("metrics")."""
    operators = _operator_routes(served) if name == ADMIN else []
    pages = [route for page in served.pages for route in page()] if name == ADMIN else []
    routes = [*served.status.routes(for_all=name != ADMIN), *operators, *pages]

    def refusal() -> GatewayError:
        return GatewayError(503, "too_many_connections", f"There are {SIDE_CONNECTIONS} open connections here.")

    routed = _routes(served, routes, _SIDE_PAGES[name], operators)
    admin, limit = name == ADMIN, ConnectionLimit(SIDE_CONNECTIONS)
    tls = served.tls if admin and served.live.config.admin_tls else None
    return _server(served, routed.serve, None, limit, refusal, for_operators=admin, tls=tls)


def _server(
    served: ServedParts,
    handler: Callable[[HttpRequest], Awaitable[ClientReply]],
    fast_handler: Callable[[ClientRequest], Awaitable[ClientReply]] | None,
    connections: ConnectionLimit,
    refusal: Callable[[], GatewayError],
    *,
    for_operators: bool = False,
    tls: ListenerTls | None = None,
) -> ClientServer:
    """A server of one port. handler, fast_handler, connections, refusal, for_operators, tls: see ClientServer."""
    server = ClientServer(
        handler,
        fast_handler,
        live=served.live,
        budget=served.memory,
        connection_limit=connections,
        refusal=refusal,
        for_operators=for_operators,
    )
    server.tls = tls
    return server


def _operator_routes(served: ServedParts) -> list[Route]:
    return [*served.operator.routes(), *served.endpoints]


def _routes(served: ServedParts, routes: Sequence[Route], serves: str, operators: Sequence[Route]) -> Routes:
    """The routes of one port. serves: description of the port for its 404. operators: the routes for operators, for the same
    text.
    """
    listed = ", ".join(f"{route.methods[0]} {PARAMETER.sub('NAME', route.path)}" for route in operators)

    def nothing_at(path: str) -> GatewayError:
        there_is = f"operators have {listed}." if listed and path.startswith("/warmroute/") else serves
        return GatewayError(404, "not_found", f"There is nothing at {path}; {there_is}")

    def write(request: HttpRequest, response: Response) -> ClientReply:
        return _written(served, request, response)

    return Routes(routes, write, nothing_at, served.actions.acted)


def _written(served: ServedParts, request: HttpRequest, response: Response) -> ClientReply:
    lines = b"" if ALLOW_ORIGIN in response.headers else cors.lines_of(request, served.live)
    headers = {**({"Content-Type": response.content_type} if response.content_type else {}), **response.headers}
    lines += "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
    # While the gateway leaves, the client's next request should reach another one; and no request can follow an incomplete one.
    keep_alive = request.complete and not served.running.leaving
    reply = request.reply(keep_alive=keep_alive, patience_s=served.live.config.limits.client_idle_s)
    reply.begin(response.status, lines, length=len(response.body), first=response.body)
    return reply


class _ForwardingEndpoint:
    """Serves requests by replicas, or from stored objects."""

    def __init__(self, served: ServedParts) -> None:
        self._live = served.live
        self._lifecycle = served.lifecycle
        self._sockets = served.sockets() if served.sockets is not None else None

    async def serve(self, request: HttpRequest) -> Response | ClientReply:
        if self._sockets is not None and self._sockets.wanted(request):
            return await self._sockets.serve(request)
        return cors.preflight(request, self._live) or await self._lifecycle.serve(request)
