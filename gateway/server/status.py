"""Status endpoints: /health, /ready, /metrics.

Metrics name tenants and the replicas' addresses. So on the clients' port they are for operators only; the listener for
Prometheus (`metrics_listen`) serves them to everyone, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

import prometheus_client

from gateway.cluster.commands import ControlPlane
from gateway.errors import GatewayError
from gateway.fleet.directory import Fleet
from gateway.fleet.pools import unserved
from gateway.request.running import RunningRequests
from gateway.server.access import Access
from gateway.server.http.request import HttpRequest
from gateway.server.routing import Response, Route, get


class Status:
    """The handlers of the status endpoints."""

    def __init__(self, *, fleet: Fleet, running: RunningRequests, control: ControlPlane, access: Access) -> None:
        self._fleet = fleet
        self._running = running
        self._control = control
        self._access = access

    def routes(self, *, for_all: bool) -> list[Route]:
        """for_all: serve metrics to everyone who can connect."""
        metrics = self.metrics if for_all else self.metrics_for_operators
        return [get("/health", self.health), get("/ready", self.ready), get("/metrics", metrics)]

    async def health(self, _request: HttpRequest) -> Response:
        return Response(b'{"status": "ok"}')

    async def ready(self, request: HttpRequest) -> Response:
        """200 if every pool, or a fallback of it, is ready (`Pool.ready`) and no shutdown has begun, else 503. Operators see
        the pools that are not ready, even if a fallback is.
        """
        missing = [pool.name for pool in self._fleet.pools if not pool.ready]
        good = not (missing and unserved(self._fleet.pools)) and not self._running.leaving
        state: dict[str, Any] = {"ready": good, "draining": self._running.leaving}
        if self._access.is_operator(request):
            state["pools_without_replica"] = missing
        return Response(json.dumps(state).encode(), 200 if good else 503)

    async def metrics(self, _request: HttpRequest) -> Response:
        body = await self._control.page()
        return Response(body, content_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def metrics_for_operators(self, request: HttpRequest) -> Response:
        if self._access.guarded or request.connection.for_operators:
            self._access.require_operator(request, reads=True)
        elif not self._access.is_operator(request):
            where = "on the admin listener (admin_listen), or for everyone on a separate listener (metrics_listen)"
            raise GatewayError(403, "forbidden", f"Metrics on this port are for operators. They are also {where}.")
        return await self.metrics(request)
