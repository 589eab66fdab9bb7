"""WebSockets of clients."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.websocket.websockets import WebSockets


def install(core: Core) -> None:
    core.sockets = WebSockets
