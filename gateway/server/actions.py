"""Actions of operators: requests that change the gateway. Each is one line of the log; features may keep it.

An authorized request to change something is an action, refused or not (`Operator.allow` marks it). Its body is kept only
if it was executed: a refused one may have a secret in the wrong place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.server.http.request import HttpRequest

log = logging.getLogger("warmroute.operators")

MAX_TEXT: Final = 200  # characters of a path or a user agent
MAX_DETAILS: Final = 1000  # characters of a body
_BAD_REQUEST: Final = 400
KEY, LOCAL = "admin key", "this machine"


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """One action. at: Unix seconds. action: method and path, or a command. by: how the operator was authorized, or the user of
    the machine. client: its address. status: of the answer. details: JSON.
    """

    at: float
    action: str
    by: str
    client: str = ""
    agent: str = ""
    status: int = 200
    details: str = ""

    def shown(self) -> dict[str, Any]:
        """The action as a line of the log."""
        shown = {"action": self.action, "status": self.status, "by": self.by, "client": self.client, "agent": self.agent}
        return {**shown, **({"details": self.details} if self.details else {})}


Keeper = Callable[[OperatorAction], None]


class Actions:
    """Logs actions, and passes them to `keepers`. wall_clock: Unix seconds."""

    def __init__(self, wall_clock: Callable[[], float], keepers: list[Keeper]) -> None:
        self._wall_clock = wall_clock
        self._keepers = keepers

    def acted(self, request: HttpRequest, status: int) -> None:
        """Records the action of this request, if it is one."""
        found = request.action
        if found is None:
            return
        request.action = None
        details = {name: value for name, value in found.items() if name != "by"} if status < _BAD_REQUEST else {}
        action = OperatorAction(
            self._wall_clock(),
            f"{request.method} {_bounded(request.path)}",
            found["by"],
            request.lease.account.client,
            _bounded(request.headers.get("User-Agent") or ""),
            status,
            _bounded(orjson.dumps(details).decode(), MAX_DETAILS) if details else "",
        )
        log.info("operator action", extra=action.shown())
        for keep in self._keepers:
            keep(action)


def _bounded(text: str, most: int = MAX_TEXT) -> str:
    """The text without control characters, and not longer than this."""
    return "".join([char if char.isprintable() else "?" for char in text[:most]])
