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

import prometheus_client
from aiohttp import web

from gateway.answers import Answers
from gateway.api import openai
from gateway.config import Config
from gateway.drain import Drain, last_in
from gateway.entry import Entry, error_response, raw_response
from gateway.errors import GatewayError, bad_request, internal_error, too_many_connections, unknown_model
from gateway.everywhere import Alone, Everywhere, Local
from gateway.failover import Failover
from gateway.front import Front, Runner
from gateway.metering import Meter
from gateway.metrics import Metrics
from gateway.operator import Operator
from gateway.proxy import Proxy
from gateway.relay import Relay
from gateway.reload import Reload, Source, Step
from gateway.replicas import Fleet
from gateway.request_log import RequestLog
from gateway.resumer import Resumer
from gateway.workers.listeners import url_of
from router import Router

log = logging.getLogger("warmroute.gateway")

_SWEEP_S = 1.0
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
    drain: Drain
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
) -> Gateway:
    """source: where a changed configuration comes from, if there is any. everywhere: the way to the other workers."""
    metrics = Metrics()
    routing, chance = config.routing, random.Random()
    router = Router(policy=routing.policy, ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20, chance=chance)
    fleet = Fleet(config, router, metrics, chance, clock)
    relay = Relay(config.timeouts)
    meter = Meter(config.prices, metrics)
    drain = Drain()
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
            resumer=Resumer(failover=failover, metrics=metrics, total_s=config.timeouts.total_s, clock=clock),
            drain=drain,
            patience_s=config.timeouts.idle_s,
            clock=clock,
        ),
        clock=clock,
    )
    step = _retuning(router, meter, relay, proxy.answers)
    reload = Reload(config=config, source=source, fleet=fleet, relay=relay, metrics=metrics, steps=[step])
    local = Local(fleet=fleet, reload=reload, router=router, metrics=metrics, clock=clock)
    others = everywhere(local)
    body_s = config.limits.body_s
    entry = Entry(body_s, proxy, metrics, drain, requests, clock)
    operator = Operator(
        fleet=fleet, router=router, proxy=proxy, everywhere=others, admin_key=config.admin_key, body_s=body_s, clock=clock
    )
    reload.tell(_rebounding(entry, operator))
    return Gateway(metrics, router, fleet, relay, meter, proxy, entry, reload, local, others, operator, drain, clock)


def _rebounding(entry: Entry, operator: Operator) -> Step:
    """The same for those who read requests."""

    def rebound(config: Config) -> None:
        entry.body_s = operator.body_s = config.limits.body_s

    return rebound


def _retuning(router: Router, meter: Meter, relay: Relay, answers: Answers) -> Step:
    """What tells these parts of another configuration."""

    def retune(config: Config) -> None:
        routing, timeouts = config.routing, config.timeouts
        router.retune(policy=routing.policy, ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20)
        meter.reprice(config.prices)
        relay.retime(timeouts)
        answers.patience_s = timeouts.idle_s
        answers.resumer.total_s = timeouts.total_s

    return retune


def make_app(gateway: Gateway) -> web.Application:
    """The web application around the parts. It probes the replicas from its startup to its cleanup."""
    app = web.Application(client_max_size=gateway.config.limits.body_mb << 20, middlewares=[_errors])
    app[GATEWAY] = gateway
    app.cleanup_ctx.append(_background)
    app.on_response_prepare.append(_finish_headers)
    app.router.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics_page),
            web.get("/v1/models", models),
            web.get("/v1/models/{model:.+}", model_entry),
            *gateway.operator.routes(),
            web.route("*", "/v1/{path:.*}", gateway.entry.handle),
        ]
    )
    return app


async def _background(app: web.Application) -> AsyncIterator[None]:
    gateway = app[GATEWAY]
    await gateway.fleet.probe_all(gateway.relay)
    background = [gateway.fleet.run(gateway.relay), _sweep(gateway), gateway.reload.run(), gateway.everywhere.run()]
    tasks = [asyncio.create_task(work) for work in background]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gateway.relay.close()


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


async def health(_request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 if every pool has a live replica and the gateway is not going down, else 503 and why."""
    gateway = request.app[GATEWAY]
    missing = [number for number, pool in enumerate(gateway.fleet.pools) if not pool.ready]
    good = not missing and not gateway.drain.draining
    state = {"ready": good, "pools_without_replica": missing, "draining": gateway.drain.draining}
    return web.json_response(state, status=200 if good else 503)


async def metrics_page(request: web.Request) -> web.Response:
    body = await request.app[GATEWAY].everywhere.page()
    return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})


async def models(request: web.Request) -> web.Response:
    """The union of the models that the live replicas list."""
    body = openai.model_list(request.app[GATEWAY].fleet.models)
    return web.Response(body=body, content_type="application/json")


async def model_entry(request: web.Request) -> web.Response:
    known, name = request.app[GATEWAY].fleet.models, request.match_info["model"]
    if name not in known:
        raise unknown_model(name, list(known))
    return web.json_response(dict(known[name]))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong outside of a forwarded request has OpenAI's error shape too."""
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error)
    except ConnectionError:
        raise  # the client left
    except web.HTTPNotFound:
        return error_response(GatewayError(404, "not_found", f"There is nothing at {request.path}; the API is under /v1/."))
    except web.HTTPMethodNotAllowed as error:
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
        limits = gateway.config.limits
        return Front(
            app,
            gateway.entry.handle,
            refuse=_refuse,
            max_connections=limits.connections,
            busy=_busy(limits.connections),
            idle_s=limits.client_idle_s,
        )

    runner = Runner(app, make_front, shutdown_timeout=0.1)

    def bound(config: Config) -> None:
        limits = config.limits
        app._client_max_size = limits.body_mb << 20
        if isinstance(runner.server, Front):
            runner.server.bound(limits.connections, _busy(limits.connections), limits.client_idle_s)

    gateway.reload.tell(bound)
    return runner


def _busy(limit: int) -> bytes:
    return raw_response(too_many_connections(limit))


def _refuse(status: int, message: str) -> web.Response:
    """The answer to what is not HTTP."""
    if status >= 500:
        return error_response(internal_error())
    return error_response(bad_request(f"The request is not valid HTTP/1.1: {message.splitlines()[0]}", code="invalid_http"))


async def serve(
    gateway: Gateway,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    started: Callable[[str], None],
    listeners: Sequence[socket.socket] = (),
) -> None:
    """Run until `stop` is set: then stop accepting, let running requests finish for `limits.drain_timeout_s`, and end.

    hurry: do not wait any longer. started: called with the base URL once requests are answered. listeners: the sockets to
    accept on (default: those of the configured address). Raises OSError if the address cannot be had.
    """
    runner = make_runner(gateway)
    await runner.setup()
    try:
        await gateway.everywhere.ready()
        sites: list[web.BaseSite] = [web.SockSite(runner, listener) for listener in listeners]
        for site in sites or [web.TCPSite(runner, *gateway.config.address)]:
            await site.start()
        started(url_of(runner.addresses[0]))
        await stop.wait()
        gateway.drain.draining = True
        await last_in(runner.listeners)
        for site in tuple(runner.sites):
            await site.stop()
        await gateway.drain.wait(gateway.config.limits.drain_timeout_s, hurry)
    finally:
        await runner.cleanup()
