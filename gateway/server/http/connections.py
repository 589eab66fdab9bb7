"""The server: makes clients' connections, and dispatches requests parsed by aiohttp.

aiohttp creates tasks, a request object and a body reader per request, and its application resolves routes and runs middlewares;
for forwarded requests this costs as much as the rest of the gateway. So a POST to FAST_PATHS goes to its handler directly:
past all of aiohttp if it is plain (`connection.py`, `plain_request.py`, `fast_path.py`), else past the application. All other
requests go to the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import HttpVersion11, web

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.config.live import Live
from gateway.errors import GatewayError
from gateway.request.client import ClientReply, ClientRequest
from gateway.server.aiohttp_seam import ServerOfOurs, factory_of, handler_of
from gateway.server.bounds import MAX_HEADER_BYTES
from gateway.server.errors import last_response, raw_response
from gateway.server.http.aiohttp_request import AiohttpRequest
from gateway.server.http.ambiguity import SPOKEN, refusal_of
from gateway.server.http.bounded_parser import refusal_of as over_bounds
from gateway.server.http.connection import FAST_PATHS, ClientConnection
from gateway.server.http.half_closed import HalfClosed
from gateway.server.http.response import HttpReply

Handler = Callable[[ClientRequest], Awaitable[ClientReply]]

_NO_PATHS: Final[frozenset[str]] = frozenset()


class ClientServer(ServerOfOurs):
    """Serves `app`; a POST to FAST_PATHS goes to `handler`, past the application."""

    def __init__(
        self,
        app: web.Application,
        handler: Handler | None,
        *,
        live: Live,
        budget: Budget,
        connection_limit: ConnectionLimit,
        refusal: Callable[[], GatewayError],
    ) -> None:
        """handler: None: all requests go to the application, and idle connections are closed for new ones. budget: of requests'
        memory. refusal: makes the answer to a connection beyond the limit.
        """
        super().__init__(
            self._dispatch,  # type: ignore[arg-type]  # requests are made by the application
            request_factory=factory_of(app),
            handler_cancellation=True,
        )
        self._through_app = handler_of(app)
        self._live = live
        self._refusal = refusal
        self._closes_idle = handler is None
        self.fast_paths = FAST_PATHS if handler else _NO_PATHS
        self.handler: Callable[[Any], Awaitable[Any]] = handler or self._through_app
        self.connection_limit = connection_limit
        self.budget = budget
        self.half_closed = HalfClosed(asyncio.get_running_loop())

    def admit(self, client: str) -> bool:
        """Count a connection of this client, if it may have one more, or if an idle connection can be closed for it.

        The latter is for the side listeners, which have few connections: idle clients must not lock out operators and
        Prometheus. The client's own connections are closed first, oldest first. On the clients' port idle connections stay.
        """
        if self.connection_limit.admit(client):
            return True
        if not self._closes_idle:
            return False
        idle = [each for each in cast(list[ClientConnection], self.connections) if each.client and each.idle]
        oldest = next((each for each in idle if each.client == client), None)
        if oldest is None and not self.connection_limit.of(client):
            oldest = next(iter(idle), None)
        if oldest is None:
            return False
        oldest.make_room(client)
        return True

    @property
    def busy(self) -> bytes:
        """The answer to a refused connection."""
        return raw_response(self._refusal())

    @property
    def max_body(self) -> int:
        """Bytes; a longer one is refused."""
        return self._live.max_body

    @property
    def _idle_s(self) -> float:
        """Limit on the time that a connection is idle or sends one request's head."""
        return self._live.config.limits.client_idle_s

    def __call__(self) -> ClientConnection:
        return ClientConnection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=self._idle_s,
            max_field_size=MAX_HEADER_BYTES,
            auto_decompress=False,  # `body.py` does, with bounds
        )

    def close_idle(self) -> bool:
        """See `CloseIdle`."""
        others = False
        for each in cast(list[ClientConnection], self.connections):
            if each.idle:
                each.force_close()
            else:
                others = True
        return others

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  (aiohttp's)
        await super().shutdown(timeout)
        self.half_closed.close()

    async def _dispatch(self, request: web.Request) -> Any:
        connection = cast(ClientConnection, request.protocol)
        lease = connection.begin_request()
        if request.version not in SPOKEN:
            return self._not_supported(request)
        if error := over_bounds(lease) or refusal_of(request):
            return last_response(error)
        if request.raw_path in self.fast_paths and request.method == "POST" and "Expect" not in request.headers:
            return await self.handler(AiohttpRequest(request))
        return await self._through_app(request)

    def _not_supported(self, request: web.Request) -> HttpReply:
        http11, to_head = request.version >= HttpVersion11, request.method == "HEAD"
        transport = cast(Any, request.transport)
        reply = HttpReply(
            request.protocol, transport, http11=http11, to_head=to_head, keep_alive=False, patience_s=self._idle_s
        )
        reply.begin(505, b"", length=0)
        return reply
