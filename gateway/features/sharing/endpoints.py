"""Operator endpoint of the exchange with other gateways: GET /warmroute/sharing."""

from __future__ import annotations

from typing import Any, Final

import orjson
from msgspec.structs import asdict

from gateway.cluster.commands import ControlPlane
from gateway.features.sharing.state import TOPIC, decode_state
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get

NO_STATE: Final[dict[str, Any]] = {
    "up": False,
    "problem": None,
    "gateway": None,
    "cluster": None,
    "gateways": [],
    "refused": [],
}


class SharingEndpoints:
    """The handler; `routes` mounts it."""

    def __init__(self, operator: Operator, control: ControlPlane) -> None:
        self._operator = operator
        self._control = control

    def routes(self) -> list[Route]:
        return [get("/warmroute/sharing", self.sharing)]

    async def sharing(self, request: HttpRequest) -> Response:
        """The state of the store and the other gateways."""
        self._operator.allow(request)
        answers = await self._control.ask(TOPIC)
        shown = [_shown(answer) for answer in answers.values()]
        value = shown[0] if shown else {"configured": False, **NO_STATE}
        return Response(orjson.dumps(value, option=orjson.OPT_INDENT_2))


def _shown(answer: bytes) -> dict[str, Any]:
    state = decode_state(answer)
    gateways = [
        {**asdict(each), "seen_for_s": round(each.seen_for_s, 1), "silent_for_s": round(each.silent_for_s, 1)}
        for each in state.gateways
    ]
    refused = [asdict(each) for each in state.refused]
    return {"configured": True, **asdict(state), "problem": state.problem or None, "gateways": gateways, "refused": refused}
