"""The composition root: the one place that knows all parts and puts them together.

config -> metrics, router -> fleet, relay, meter -> proxy -> reload -> operator -> routes
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from gateway.accept import Site
from gateway.access import ON_ADMIN_LISTENER, Access
from gateway.answers import Answers
from gateway.budget import Budget
from gateway.config import ALL, Config
from gateway.connections import Connections
from gateway.drain import Drain, last_in
from gateway.entry import Entry, error_response, raw_response
from gateway.errors import GatewayError, internal_error, too_many_connections
from gateway.everywhere import Alone, Everywhere, Local
from gateway.failover import Failover
from gateway.front import Front, Runner
from gateway.loops import VIA_HEADER, LoopGuard
from gateway.metering import Meter
from gateway.metrics import Metrics
from gateway.operator import Operator
from gateway.parser.parsing import Parsing
from gateway.parser.process import ParserProcess
from gateway.process import budget_bytes, connection_limit, warn_of_connections
from gateway.proxy import Proxy
from gateway.relay import Relay
from gateway.reload import Reload, Source, Step
from gateway.replicas import FIRST_PROBES_S, Fleet
from gateway.request_log import RequestLog
from gateway.resolver import Resolver
from gateway.resumer import Resumer
from gateway.side import serving
from gateway.sockets import NO_SIDES, SideSockets
from gateway.status import Status
from gateway.workers.handover import Receiver
from gateway.workers.listeners import open_listeners, url_of
from router import Router

log = logging.getLogger("warmroute.gateway")

_SWEEP_S = 1.0
ADMIN = "admin"
_SERVES = web.AppKey("serves", str)  # what an application's listener serves, for whoever asks it for something else
_API = "the API is under /v1/."
_SIDE_PAGES = {
    ADMIN: "the admin listener (admin_listen) serves /warmroute/..., /metrics, /health and /ready; the API is on `listen`.",
    "metrics": "the metrics listener (metrics_listen) serves /metrics, /health and /ready; the API is on `listen`.",
}
SIDE_CONNECTIONS = 256  # at once, to the listener for operators, and to that for Prometheus
_SLICE_S = 0.01  # from one slice of a longer sweep to the next: requests go first

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one running gateway. Tests look inside through it."""

    metrics: Metrics
    router: Router
    fleet: Fleet
    relay: Relay
    meter: Meter
    proxy: Proxy
    entry: Entry
    reload: Reload
    local: Local
    everywhere: Everywhere
    operator: Operator
    status: Status
    drain: Drain
    budget: Budget
    places: Connections
    clock: Callable[[], float]

    @property
    def config(self) -> Config:
        """The one in force."""
        return self.reload.config


GATEWAY = web.AppKey("gateway", Gateway)


def compose(
    config: Config,
    requests: RequestLog,
    clock: Callable[[], float] = time.monotonic,
    source: Source | None = None,
    everywhere: Callable[[Local], Everywhere] = Alone,
    resolver: Resolver | None = None,
    loops: LoopGuard | None = None,
) -> Gateway:
    """source: where a changed configuration comes from, if there is any. everywhere: the way to the other workers.
    resolver: of the replicas' host names (default: the system's). loops: knows this gateway's id (default: a new one).
    """
    metrics = Metrics()
    routing, chance = config.routing, random.Random()
    router = Router(policy=routing.policy, ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20, chance=chance)
    fleet = Fleet(config, router, metrics, chance, clock)
    loops = loops or LoopGuard()
    relay = Relay(config.timeouts, resolver, fleet.hung_up, loops)
    meter = Meter(config.prices, metrics)
    drain = Drain()
    parsing = Parsing(ParserProcess(), routing.block_bytes, routing.block_tokens)
    access = Access(config.admin_key, expose_headers=routing.expose_headers == ALL)
    failover = Failover(fleet=fleet, relay=relay, metrics=metrics, clock=clock, chance=chance)
    proxy = Proxy(
        routing=routing,
        fleet=fleet,
        router=router,
        failover=failover,
        meter=meter,
        metrics=metrics,
        answers=Answers(
            failover=failover,
            resumer=Resumer(failover=failover, parsing=parsing, metrics=metrics, total_s=config.timeouts.total_s, clock=clock),
            drain=drain,
            audience=access,
            patience_s=config.timeouts.idle_s,
            clock=clock,
        ),
        clock=clock,
    )
    budget, places = Budget(budget_bytes(config)), Connections(connection_limit(config))
    entry = Entry(config.limits.body_s, parsing, proxy, drain, requests, loops, clock)
    steps = [_retuning(router, meter, relay, proxy), _rebounding(entry, access)]
    reload = Reload(config=config, source=source, fleet=fleet, relay=relay, metrics=metrics, steps=steps)
    reads = [partial(metrics.read_budget, budget), partial(metrics.read_connections, places)]
    local = Local(fleet=fleet, reload=reload, router=router, metrics=metrics, requests=requests, reads=reads, clock=clock)
    others = everywhere(local)
    operator = Operator(
        fleet=fleet, parsing=parsing, proxy=proxy, everywhere=others, access=access, config=lambda: reload.config, clock=clock
    )
    status = Status(fleet=fleet, drain=drain, everywhere=others, access=access)
    return Gateway(
        metrics,
        router,
        fleet,
        relay,
        meter,
        proxy,
        entry,
        reload,
        local,
        others,
        operator,
        status,
        drain,
        budget,
        places,
        clock,
    )


def _rebounding(entry: Entry, access: Access) -> Step:
    """Applies a new configuration's time for request bodies and its audience of headers."""

    def rebound(config: Config) -> None:
        entry.body_s = config.limits.body_s
        access.expose_headers = config.routing.expose_headers == ALL

    return rebound


def _retuning(router: Router, meter: Meter, relay: Relay, proxy: Proxy) -> Step:
    """What tells these parts of another configuration."""

    def retune(config: Config) -> None:
        routing, timeouts = config.routing, config.timeouts
        router.retune(policy=routing.policy, ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20)
        meter.reprice(config.prices)
        relay.retime(timeouts)
        proxy.routing = routing
        proxy.answers.patience_s = timeouts.idle_s
        proxy.answers.resumer.total_s = timeouts.total_s

    return retune


def make_app(gateway: Gateway) -> web.Application:
    """The clients' application around the parts. It probes the replicas from its startup to its cleanup."""
    app = _application(gateway, _API)
    app.cleanup_ctx.append(_background)
    app.router.add_routes(
        [
            *gateway.status.routes(for_all=False),
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", model_entry),
            *gateway.operator.routes(),
            web.route("*", "/v1/{path:.*}", gateway.entry.handle),
        ]
    )
    return app


def make_side_app(gateway: Gateway, name: str) -> web.Application:
    """The application on the listener for operators ("admin") or for Prometheus ("metrics")."""
    app = _application(gateway, _SIDE_PAGES[name])
    app[ON_ADMIN_LISTENER] = name == ADMIN
    app.router.add_routes(gateway.status.routes(for_all=name != ADMIN))
    if name == ADMIN:
        app.router.add_routes(gateway.operator.routes())
    return app


def _application(gateway: Gateway, serves: str) -> web.Application:
    app = web.Application(client_max_size=gateway.config.limits.body_mb << 20, middlewares=[_errors])
    app[GATEWAY] = gateway
    app[_SERVES] = serves
    app.on_response_prepare.append(_finish_headers)
    return app


async def _background(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    first_probes = asyncio.create_task(gateway.fleet.probe_all(gateway.relay))
    if (await asyncio.wait([first_probes], timeout=FIRST_PROBES_S))[0]:
        first_probes.result()  # it raises nothing but a bug
    background = [gateway.fleet.run(gateway.relay), _sweep(gateway), gateway.reload.run(), gateway.everywhere.run()]
    tasks = [first_probes, *(asyncio.create_task(work) for work in background)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gateway.relay.close()
    await gateway.entry.parsing.process.close()


async def _sweep(gateway: Gateway) -> None:
    """Forget what is past its time also while no request comes, and who has left."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        while gateway.router.sweep(gateway.clock()):  # noqa: ASYNC110  (nothing tells when: it is to go on slowly)
            await asyncio.sleep(_SLICE_S)
        for url in gateway.fleet.settle():
            gateway.relay.forget(url)


async def _finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "warmroute"
    if request.app[GATEWAY].drain.draining:
        response.force_close()  # so that the client's next request goes to somebody who stays


# -- endpoints


async def models(request: web.Request) -> web.Response:
    """The union of the models that the live replicas list."""
    gateway = request.app[GATEWAY]
    gateway.entry.loops.require_no_loop(request.headers.get(VIA_HEADER))
    return _json_response(gateway.fleet.catalog.answer)


async def model_entry(request: web.Request) -> web.Response:
    return _json_response(request.app[GATEWAY].fleet.entry(request.match_info["model"]))


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong outside of a forwarded request has OpenAI's error shape too."""
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error)
    except ConnectionError:
        raise  # the client left
    except web.HTTPNotFound as error:
        error.__traceback__ = None  # aiohttp's match keeps the error: its frames refer to the request, and that to the match
        return error_response(GatewayError(404, "not_found", f"There is nothing at {request.path}; {request.app[_SERVES]}"))
    except web.HTTPMethodNotAllowed as error:
        error.__traceback__ = None  # likewise
        allowed = ", ".join(sorted(error.allowed_methods))
        return error_response(GatewayError(405, "method_not_allowed", f"{request.path} takes {allowed}."))
    except web.HTTPException as error:
        return error_response(GatewayError(error.status, "http_error", error.reason))
    except Exception:  # the last border: a bug must not cost more than its own request
        log.exception("unhandled error", extra={"path": request.path})
        return error_response(internal_error())


def make_runner(gateway: Gateway) -> Runner:
    """The server around `make_app`."""
    app = make_app(gateway)

    def make_front() -> Front:
        connections = connection_limit(gateway.config)
        return Front(
            app,
            gateway.entry.handle,
            respond=error_response,
            budget=gateway.budget,
            places=gateway.places,
            busy=_busy(connections),
            idle_s=gateway.config.limits.client_idle_s,
        )

    runner = Runner(app, make_front, shutdown_timeout=0.1)

    def bound(config: Config) -> None:
        limits = config.limits
        app._client_max_size = limits.body_mb << 20
        gateway.budget.limit = budget_bytes(config)
        if isinstance(runner.server, Front):
            connections = connection_limit(config)
            runner.server.bound(connections, _busy(connections), limits.client_idle_s)

    gateway.reload.tell(bound)
    return runner


def make_side_runner(gateway: Gateway, name: str) -> Runner:
    """The server around `make_side_app`."""
    app = make_side_app(gateway, name)

    def make_front() -> Front:
        busy = raw_response(GatewayError(503, "too_many_connections", f"There are {SIDE_CONNECTIONS} open connections here."))
        idle_s = gateway.config.limits.client_idle_s
        return Front(
            app,
            None,
            respond=error_response,
            budget=gateway.budget,
            places=Connections(SIDE_CONNECTIONS),
            busy=busy,
            idle_s=idle_s,
        )

    runner = Runner(app, make_front, shutdown_timeout=0.1)

    def bound(config: Config) -> None:
        app._client_max_size = config.limits.body_mb << 20
        if isinstance(runner.server, Front):
            runner.server.bound(SIDE_CONNECTIONS, runner.server.busy, config.limits.client_idle_s)

    gateway.reload.tell(bound)
    return runner


def _busy(limit: int) -> bytes:
    return raw_response(too_many_connections(limit))


async def serve(
    gateway: Gateway,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    started: Callable[[str], None],
    listeners: Sequence[socket.socket] = (),
    sides: SideSockets = NO_SIDES,
    handed: socket.socket | None = None,
) -> None:
    """Run until `stop` is set: then stop accepting, let running requests finish for `limits.drain_timeout_s`, and end.

    hurry: do not wait any longer. started: called with the base URL once requests are answered. listeners: the sockets to
    accept clients on (default: new ones, on the configured address). sides: those for operators and for Prometheus, who are
    answered to the end. handed: brings connections that the supervisor has accepted (`handover.py`). Raises OSError if the
    address cannot be had.
    """
    warn_of_connections(gateway.config)
    runner, receiver = make_runner(gateway), None
    await runner.setup()
    try:
        await gateway.everywhere.ready()
        async with serving(sides, partial(make_side_runner, gateway)):
            for listener in listeners or open_listeners(*gateway.config.address):
                await Site(runner, listener).start()
            if handed and runner.server:
                receiver = Receiver(handed, runner.server)
            started(url_of(runner.addresses[0]))
            await stop.wait()
            gateway.drain.draining = True
            await last_in(runner.listeners, hurry)
            for site in tuple(runner.sites):
                await site.stop()
            await gateway.drain.wait(gateway.config.limits.drain_timeout_s, hurry)
    finally:
        if receiver:
            receiver.close()
        await runner.cleanup()
