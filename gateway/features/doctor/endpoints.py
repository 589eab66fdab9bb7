"""The prefix doctor's endpoint for operators."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from gateway.cluster.commands import ControlPlane
from gateway.config.live import Live
from gateway.features.doctor.examiner import Examiner
from gateway.features.doctor.watch import WATCH_S
from gateway.server.operator import Operator
from gateway.telemetry.exposition import SingleFlight


class DoctorEndpoints:
    """The handler; `routes` mounts it. clock: of the gateway."""

    def __init__(self, operator: Operator, control: ControlPlane, live: Live, clock: Callable[[], float]) -> None:
        self._operator = operator
        self._control = control
        self._live = live
        self._clock = clock
        self._examiner = Examiner()
        self._examinations = SingleFlight(self._examine)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/warmroute/doctor", self.doctor)]

    async def doctor(self, request: web.Request) -> web.Response:
        """Where the prefixes of what has been asked lately break, and why. The first question begins the watch.

        All who ask while an examination runs get that one's answer.
        """
        self._operator.allow(request)
        return web.Response(body=await self._examinations.get(), content_type="application/json")

    async def _examine(self) -> bytes:
        watched = await self._control.seen()
        begun = [each.since for each in watched if each.since is not None]
        watched_s = round(max(0.0, self._clock() - min(begun)), 1) if begun else None
        about = {"watched_s": watched_s, "watches_for_s": WATCH_S}
        return await self._examiner.examine(about, self._live.prices, watched, time.time())
