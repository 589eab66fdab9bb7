"""WebSockets of clients."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.websocket.create_message import OPERATION
from gateway.features.websocket.websockets import WebSockets


def install(core: Core) -> None:
    core.sockets = WebSockets
    core.parsing.process.operations[OPERATION] = "gateway.features.websocket.create_message:create_bounded"
