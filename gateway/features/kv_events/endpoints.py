"""Operator endpoint: GET /warmroute/kv_events."""

from __future__ import annotations

import msgspec

from gateway.features.kv_events.following import PublisherSet
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get


class KvEventEndpoints:
    """The handler; `routes` mounts it."""

    def __init__(self, operator: Operator, following: PublisherSet) -> None:
        self._operator, self._following = operator, following

    def routes(self) -> list[Route]:
        return [get("/warmroute/kv_events", self.kv_events)]

    async def kv_events(self, request: HttpRequest) -> Response:
        """The followed publishers of cache events, with their counts, in the worker that answers."""
        self._operator.allow(request)
        return Response(msgspec.json.encode({"publishers": self._following.rows()}))
