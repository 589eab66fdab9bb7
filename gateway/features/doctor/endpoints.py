"""Operator endpoint of the prefix doctor: GET /warmroute/doctor."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.cluster.commands import ControlPlane
from gateway.config.live import Live
from gateway.features.doctor.examiner import Examiner
from gateway.features.doctor.watch import TOPIC, WATCH_S, decode_watched
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get
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

    def routes(self) -> list[Route]:
        return [get("/warmroute/doctor", self.doctor)]

    async def doctor(self, request: HttpRequest) -> Response:
        """Where the prefixes of recent requests break, and why. The first question starts the watch.

        Operators who ask during an examination get its answer. A late worker is left out.
        """
        self._operator.allow(request)
        return Response(await self._examinations.get())

    async def _examine(self) -> bytes:
        watched = [decode_watched(answer) for answer in (await self._control.ask(TOPIC)).values()]
        begun = [each.since for each in watched if each.since is not None]
        watched_s = round(max(0.0, self._clock() - min(begun)), 1) if begun else None
        about = {"watched_s": watched_s, "watches_for_s": WATCH_S}
        return await self._examiner.examine(about, self._live.prices, watched, time.time())
