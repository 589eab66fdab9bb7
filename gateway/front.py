"""The server's front: it makes the clients' connections, and says which way a request goes that aiohttp has read.

aiohttp makes two tasks' work, a request with all its properties and a body's reader of every request, and its application
resolves routes and runs middlewares; for what is forwarded this costs as much as the rest of the gateway. So what is POSTed to
the paths in SHORT goes to its handler directly: past all of aiohttp if it is plain (`client.py`, `plain.py`, `short.py`), else
past the application. Everything else goes to the application.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web

from gateway.acceptable import SPOKEN, refusal_of
from gateway.bounds import refusal_of as over_bounds
from gateway.budget import Budget
from gateway.client import SHORT, ClientConnection
from gateway.connections import Connections
from gateway.errors import GatewayError
from gateway.half_closed import HalfClosed
from gateway.reply import Reply

Handler = Callable[[Any], Awaitable[Any]]  # of a web.Request or a PlainRequest

MAX_HEADER_BYTES: Final = 64 << 10  # one header line: tokens and cookies can be long
_NOTHING: Final[frozenset[str]] = frozenset()


class Front(web.Server):
    """Serves `app`; what is POSTed to the paths in SHORT goes to `handler` without the application's detours."""

    def __init__(
        self,
        app: web.Application,
        handler: Handler | None,
        *,
        respond: Callable[[GatewayError], web.Response],
        budget: Budget,
        places: Connections,
        busy: bytes,
        idle_s: float,
    ) -> None:
        """handler: None: everything goes to the application, and an idle connection makes room for a new one. respond: makes
        the answer to what is not served. budget: of the bytes that requests may hold. places: of connections; busy: what one
        too many is answered. idle_s: for so long a connection may be idle, or be sending one request's head.
        """
        super().__init__(
            self._dispatch,  # type: ignore[arg-type]  # requests are made by the application
            request_factory=app._make_request,
            handler_cancellation=True,
        )
        self._app = app
        self.short = SHORT if handler else _NOTHING
        self._closes_idle = handler is None
        self.handler = handler or app._handle
        self.places = places
        self._idle_s = idle_s
        self._respond = respond
        self.budget = budget
        self.half_closed = HalfClosed(self._loop)
        self.busy = busy

    def bound(self, max_connections: int, busy: bytes, idle_s: float) -> None:
        """Other bounds; connections that are open stay, and keep theirs."""
        self.places.limit = max_connections
        self._idle_s = idle_s
        self.busy = busy

    def admit(self, client: str) -> bool:
        """Count one more connection of this client, if it may have it, or if an idle connection can be closed for it.

        The latter is for operators and Prometheus: their listeners have few places, and whoever keeps connections there without
        asking anything must not shut them out. The client's own connections go first, the oldest before all others. On the
        clients' port idle connections are what a keep-alive is for, and stay.
        """
        if self.places.admit(client):
            return True
        if not self._closes_idle:
            return False
        idle = [each for each in cast(list[ClientConnection], self.connections) if each.client and each.idle]
        oldest = next((each for each in idle if each.client == client), None)
        if oldest is None and not self.places.of(client):
            oldest = next(iter(idle), None)
        if oldest is None:
            return False
        oldest.make_room(client)
        return True

    @property
    def max_body(self) -> int:
        """Bytes; a longer one is refused."""
        return self._app._client_max_size

    def __call__(self) -> ClientConnection:
        return ClientConnection(
            self,
            loop=self._loop,
            access_log=None,
            keepalive_timeout=self._idle_s,
            max_field_size=MAX_HEADER_BYTES,
            auto_decompress=False,  # `body.py` does, with bounds
        )

    def refuse(self, error: GatewayError) -> web.Response:
        """The connection ends with it: whether the rest of the request will still come is not known."""
        answer = self._respond(error)
        answer.force_close()
        return answer

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  (aiohttp's)
        await super().shutdown(timeout)
        self.half_closed.close()

    async def _dispatch(self, request: web.Request) -> Any:
        connection = cast(ClientConnection, request.protocol)
        lease = connection.begin_request()
        if request.version not in SPOKEN:
            reply = Reply(request, keep_alive=False, patience_s=self._idle_s)
            reply.begin(505, b"", length=0)
            return reply
        if error := over_bounds(lease) or refusal_of(request):
            return self.refuse(error)
        if request.raw_path in self.short and request.method == "POST" and "Expect" not in request.headers:
            return await self.handler(request)
        return await self._app._handle(request)


class Runner(web.AppRunner):
    """Starts and ends the application, and serves it through a Front."""

    def __init__(self, app: web.Application, make_front: Callable[[], Front], *, shutdown_timeout: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._make_front = make_front

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application up
        return self._make_front()

    @property
    def listeners(self) -> list[socket.socket]:
        """Its listening sockets."""
        return [listener for site in self._sites for listener in getattr(site._server, "sockets", ())]
