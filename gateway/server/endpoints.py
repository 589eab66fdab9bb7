"""The aiohttp applications: routes of the clients' port and of the side listeners."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.cluster.process import connection_limit
from gateway.config.live import Live
from gateway.dialects.table import ENGINES_OWN
from gateway.errors import GatewayError, internal_error, too_many_connections
from gateway.request.client import ClientReply, ClientRequest
from gateway.request.lifecycle import Lifecycle
from gateway.request.running import Running
from gateway.server import cors
from gateway.server.access import ON_ADMIN_LISTENER
from gateway.server.aiohttp_seam import Runner, Seam
from gateway.server.errors import error_response
from gateway.server.fallback.request import adapt
from gateway.server.fallback.server import PublicRunner, held_by
from gateway.server.http.aiohttp_request import AiohttpRequest
from gateway.server.http.connections import ClientServer
from gateway.server.models import Models
from gateway.server.operator import Operator
from gateway.server.status import Status

log = logging.getLogger("warmroute.gateway")

ADMIN: Final = "admin"
SIDE_CONNECTIONS: Final = 256  # at once, on each side listener
SHUTDOWN_S: Final = 0.1  # for connections, when all requests are over

_SERVES = web.AppKey("serves", str)  # what an application serves, for the text of its 404
_OPERATORS = web.AppKey("operators", str)  # what it serves for operators, likewise; "": nothing
_API: Final = "the API is under /v1/."
_SIDE_PAGES: Final = {
    ADMIN: "the admin listener (admin_listen) serves /warmroute/..., /metrics, /health and /ready; the API is on `listen`.",
    "metrics": "the metrics listener (metrics_listen) serves /metrics, /health and /ready; the API is on `listen`.",
}

_PARAMETER: Final = re.compile(r"\{[^}]*\}")  # of a route's path

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnyRunner = Runner | PublicRunner
Route = web.RouteDef
Routes = Callable[[], list[Route]]
Endpoints = Callable[[Operator, LocalControl, ControlPlane], list[Route]]


class Sockets(Protocol):
    """Serves WebSockets of clients."""

    def wanted(self, request: web.Request) -> bool:
        """Whether `serve` is for this request."""

    async def serve(self, request: AiohttpRequest) -> object:
        """Until the connection has ended, or the answer is another one. Raises ConnectionError."""


@dataclass(frozen=True, slots=True)
class Served:
    """The parts behind the applications. endpoints: for operators, by features; pages: of the admin listener alone. sockets:
    makes what serves WebSockets, None: nothing does. memory, connections: limits on clients. seam: whether there is a fast
    path.
    """

    live: Live
    lifecycle: Lifecycle
    models: Models
    operator: Operator
    endpoints: list[web.RouteDef]
    pages: list[Routes]
    sockets: Callable[[], Sockets] | None
    status: Status
    running: Running
    memory: Budget
    connections: ConnectionLimit
    seam: Seam


_SERVED = web.AppKey("served", Served)
_SOCKETS = web.AppKey("sockets", Sockets)


def clients_runner(served: Served) -> AnyRunner:
    """The server on the clients' port. Called within the event loop."""

    def refusal() -> GatewayError:
        return too_many_connections(connection_limit(served.live.config))

    return _runner(served, clients_app(served), served.lifecycle.serve, served.connections, refusal)


def side_runner(served: Served, name: str) -> AnyRunner:
    """The server on the listener for operators (ADMIN) or for Prometheus ("metrics"). Called within the event loop."""

    def refusal() -> GatewayError:
        return GatewayError(503, "too_many_connections", f"There are {SIDE_CONNECTIONS} open connections here.")

    return _runner(served, side_app(served, name), None, ConnectionLimit(SIDE_CONNECTIONS), refusal)


def _runner(
    served: Served,
    app: web.Application,
    handler: Callable[[ClientRequest], Awaitable[ClientReply]] | None,
    connection_limit: ConnectionLimit,
    refusal: Callable[[], GatewayError],
) -> AnyRunner:
    """handler, connection_limit, refusal: see ClientServer."""
    if not served.seam.holds:
        app.middlewares.insert(0, held_by(served.memory))
        return PublicRunner(
            app,
            live=served.live,
            budget=served.memory,
            connection_limit=connection_limit,
            refusal=refusal,
            shutdown_timeout=SHUTDOWN_S,
        )

    def make_server() -> ClientServer:
        return ClientServer(
            app, handler, live=served.live, budget=served.memory, connection_limit=connection_limit, refusal=refusal
        )

    return Runner(app, make_server, shutdown_timeout=SHUTDOWN_S)


def clients_app(served: Served) -> web.Application:
    app = _application(served, _API)
    if served.sockets is not None:
        app[_SOCKETS] = served.sockets()
    _add_operator(app)
    app.router.add_routes(
        [
            *served.status.routes(for_all=False),
            *served.models.routes(),
            web.route("*", "/v1/{path:.*}", _forward),
            *(web.route("*", path, _forward) for path in ENGINES_OWN),
        ]
    )
    return app


def side_app(served: Served, name: str) -> web.Application:
    app = _application(served, _SIDE_PAGES[name])
    app[ON_ADMIN_LISTENER] = name == ADMIN
    app.router.add_routes(served.status.routes(for_all=name != ADMIN))
    if name == ADMIN:
        _add_operator(app)
        for page in served.pages:
            app.router.add_routes(page())
    return app


def _add_operator(app: web.Application) -> None:
    routes = [*app[_SERVED].operator.routes(), *app[_SERVED].endpoints]
    app.router.add_routes(routes)
    served = ", ".join(f"{route.method} {_PARAMETER.sub('NAME', route.path)}" for route in routes)
    app[_OPERATORS] = f"operators have {served}."


def _application(served: Served, serves: str) -> web.Application:
    app = web.Application(middlewares=[_errors])
    app[_SERVED] = served
    app[_SERVES] = serves
    app[_OPERATORS] = ""
    app.on_response_prepare.append(_finish_headers)
    return app


async def _finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "warmroute"
    cors.finish(request, response, request.app[_SERVED].live)
    if request.app[_SERVED].running.leaving:
        response.force_close()  # the client's next request goes to another gateway
        response.headers["Connection"] = "close"  # aiohttp has made its headers before this signal


async def _forward(request: web.Request) -> Any:
    """Returns a `ClientReply` or an `UpgradedResponse`, which stand in for a `web.StreamResponse` (see `http/response.py`)."""
    served = request.app[_SERVED]
    sockets = request.app.get(_SOCKETS)
    if sockets is not None and sockets.wanted(request):
        return await sockets.serve(adapt(request))
    return cors.preflight(request, served.live) or await served.lifecycle.serve(adapt(request))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors outside of forwarded requests in OpenAI's error format."""
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error)
    except ConnectionError:
        raise  # the client left
    except web.HTTPNotFound as error:
        error.__traceback__ = None  # breaks a cycle: match, error, frames, request
        operators = request.app[_OPERATORS] if request.path.startswith("/warmroute/") else ""
        serves = operators or request.app[_SERVES]
        return error_response(GatewayError(404, "not_found", f"There is nothing at {request.path}; {serves}"))
    except web.HTTPMethodNotAllowed as error:
        error.__traceback__ = None  # likewise
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(GatewayError(405, "method_not_allowed", f"{request.path} takes {allowed}."))
    except web.HTTPException as error:
        return error_response(GatewayError(error.status, "http_error", error.reason))
    except Exception:  # outermost handler: a bug fails its own request only
        log.exception("unhandled error", extra={"path": request.path})
        return error_response(internal_error())
