"""Operator endpoint of recordings: GET /warmroute/recording."""

from __future__ import annotations

import contextlib
import re
from typing import Final

import msgspec

from gateway import __version__
from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.errors import bad_request
from gateway.features.recording.recording import TOPIC, question_of
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get

MAX_CURSORS: Final = 256  # per recorder; a gateway has fewer workers
_CURSOR: Final = re.compile(r"[0-9a-f]{1,32}:[0-9]{1,18}", re.ASCII)


class RecordingEndpoints:
    """The handler; `routes` mounts it."""

    def __init__(self, operator: Operator, local: LocalControl, control: ControlPlane) -> None:
        self._operator = operator
        self._router = local.router
        self._clock = local.clock
        self._control = control

    def routes(self) -> list[Route]:
        return [get("/warmroute/recording", self.recording)]

    async def recording(self, request: HttpRequest) -> Response:
        """The requests that have ended since a recorder's last question (`recording.py`), of all workers.

        A late worker answers the next question.
        """
        self._operator.allow(request)
        question = question_of(_cursors(request.query.get("after", "")), _share(request.query.get("sample", "1")))
        pages = await self._control.ask(TOPIC, question)
        about = {
            "version": __version__,
            "now": self._clock(),
            "policy": self._router.policy_name,
            "pages": [msgspec.Raw(page) for page in pages.values()],
        }
        return Response(msgspec.json.encode(about))


def _cursors(text: str) -> dict[str, int]:
    """Parses RING:NUMBER,... Raises GatewayError 400."""
    if not text:
        return {}
    parts = text.split(",")
    if len(parts) <= MAX_CURSORS and all(_CURSOR.fullmatch(part) for part in parts):
        return {ring: int(number) for ring, _, number in (part.partition(":") for part in parts)}
    shape = f"at most {MAX_CURSORS} of RING:NUMBER, separated by commas: 'ring' and 'last' of the pages of an earlier answer"
    raise bad_request(f"'after' must be {shape}.", "after")


def _share(text: str) -> float:
    """Raises GatewayError 400."""
    with contextlib.suppress(ValueError):
        if 0 < (share := float(text)) <= 1:
            return share
    raise bad_request("'sample' must be the share of the conversations, above 0, at most 1.", "sample")
