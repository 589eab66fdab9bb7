"""Dispatches WebSocket requests. Other upgrade requests are answered as plain HTTP."""

from __future__ import annotations

from typing import Final

from gateway.core import Core
from gateway.errors import GatewayError
from gateway.features.websocket.handshake import VERSION, WRONG_VERSION, wants_websocket
from gateway.features.websocket.responses_socket import RESPONSES_PATH, ResponsesSockets
from gateway.features.websocket.tunnel import TUNNELED, Tunnels
from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest

_VERSION: Final = f"Sec-WebSocket-Version: {VERSION}\r\n".encode()


class WebSockets:
    """The WebSockets of one gateway. Their requests go through its lifecycle."""

    def __init__(self, core: Core) -> None:
        live, running, lifecycle = core.live, core.running, core.lifecycle
        self._lifecycle = lifecycle
        self._responses = ResponsesSockets(live=live, lifecycle=lifecycle, parsing=core.parsing, running=running)
        self._tunnels = Tunnels(live=live, lifecycle=lifecycle, running=running, extensions=core.extensions)

    def wanted(self, request: HttpRequest) -> bool:
        """True if `serve` handles this request."""
        return wants_websocket(request) and (request.path == RESPONSES_PATH or request.path in TUNNELED)

    async def serve(self, request: HttpRequest) -> ClientReply:
        """Serves a connection until its end, or returns another answer. Raises ConnectionError."""
        begun = self._lifecycle.clock()
        try:
            if request.path == RESPONSES_PATH:
                return await self._responses.serve(request)
            return await self._tunnels.serve(request)
        except GatewayError as error:
            return self._lifecycle.refuse(request, error, begun, _VERSION if error.status == WRONG_VERSION else b"")
