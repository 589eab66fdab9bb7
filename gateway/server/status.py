"""Status endpoints: /health, /ready, /metrics.

Metrics name tenants and the replicas' addresses. So on the clients' port they are for operators; everyone else reads them on
the listener for Prometheus (`metrics_listen`), which serves nothing else.
"""

from __future__ import annotations

from typing import Any

import prometheus_client
from aiohttp import web

from gateway.cluster.commands import ControlPlane
from gateway.errors import GatewayError
from gateway.fleet.directory import Fleet
from gateway.fleet.pools import unserved
from gateway.request.running import Running
from gateway.server.access import ON_ADMIN_LISTENER, Access
from gateway.server.fallback.request import adapt


class Status:
    """The handlers."""

    def __init__(self, *, fleet: Fleet, running: Running, control: ControlPlane, access: Access) -> None:
        self._fleet = fleet
        self._running = running
        self._control = control
        self._access = access

    def routes(self, *, for_all: bool) -> list[web.RouteDef]:
        """for_all: serve metrics to everyone who can connect."""
        metrics = self.metrics if for_all else self.metrics_for_operators
        return [web.get("/health", self.health), web.get("/ready", self.ready), web.get("/metrics", metrics)]

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 if every pool is ready (`Pool.ready`), or a fallback of it, and no shutdown has begun, else 503; operators see
        the missing pools, those with a fallback too.
        """
        missing = [pool.name for pool in self._fleet.pools if not pool.ready]
        good = not (missing and unserved(self._fleet.pools)) and not self._running.leaving
        state: dict[str, Any] = {"ready": good, "draining": self._running.leaving}
        if self._access.is_operator(adapt(request)):
            state["pools_without_replica"] = missing
        return web.json_response(state, status=200 if good else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        body = await self._control.page()
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def metrics_for_operators(self, request: web.Request) -> web.Response:
        if self._access.guarded or request.app.get(ON_ADMIN_LISTENER, False):
            self._access.require_operator(adapt(request))
        elif not self._access.is_operator(adapt(request)):
            where = "on the admin listener (admin_listen), or for everyone on a separate listener (metrics_listen)"
            raise GatewayError(403, "forbidden", f"Metrics on this port are for operators. They are also {where}.")
        return await self.metrics(request)
