"""The server's front: aiohttp's connections, with bounds, our error shape, and a short way for the requests that are many.

`aiohttp.web.Application` resolves routes and runs middlewares for every request; for what is forwarded this costs as much as
the rest of the gateway. So `Front` hands those paths to their handler directly, and everything else to the application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

if TYPE_CHECKING:
    from gateway.relay import Attempt

log = logging.getLogger("warmroute.gateway")

Handler = Callable[[web.Request], Awaitable[Any]]

IDLE_S = 75.0  # a client's connection may be idle, or be sending one request's head, for so long
SHORT = frozenset(["/v1/chat/completions", "/v1/completions"])
MAX_HEADER_BYTES = 64 << 10  # one header line: tokens and cookies can be long


class ClientConnection(web.RequestHandler):
    """One client's connection. source: the replica's answer that is being written to it; it is paused while nobody reads."""

    __slots__ = ("_front", "source")

    def __init__(self, front: Front, **options: Any) -> None:
        super().__init__(front, **options)
        self._front = front
        self.source: Attempt | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._front.full:
            refused = cast(asyncio.Transport, transport)  # uvloop's is no subclass
            refused.write(self._front.busy)
            refused.close()
        else:
            super().connection_made(transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.source:
            self.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.source:
            self.source.resume()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP is answered once, in our shape, and without a traceback: it is the client's fault."""
        answer = self._front.refuse(status, message or "")
        if status >= 500:
            log.error("unhandled error", exc_info=exc)
        answer.force_close()
        return answer


class Front(web.Server):
    """Serves `app`; what is POSTed to the paths in SHORT goes to `handler` without the application's detours."""

    def __init__(
        self,
        app: web.Application,
        handler: Handler,
        *,
        refuse: Callable[[int, str], web.Response],
        max_connections: int,
        busy: bytes,
    ) -> None:
        """refuse: makes the answer to what is not HTTP. busy: the bytes for one connection too many."""
        super().__init__(
            self._dispatch,  # type: ignore[arg-type]  # requests are made by the application
            request_factory=app._make_request,
            handler_cancellation=True,
        )
        self._app = app
        self._handler = handler
        self._max_connections = max_connections
        self.refuse = refuse
        self.busy = busy

    @property
    def full(self) -> bool:
        return len(self._connections) >= self._max_connections

    def __call__(self) -> ClientConnection:
        return ClientConnection(
            self, loop=self._loop, access_log=None, keepalive_timeout=IDLE_S, max_field_size=MAX_HEADER_BYTES
        )

    async def _dispatch(self, request: web.Request) -> Any:
        if request.raw_path in SHORT and request.method == "POST" and "Expect" not in request.headers:
            return await self._handler(request)
        return await self._app._handle(request)


class Runner(web.AppRunner):
    """Starts and ends the application, and serves it through a Front."""

    def __init__(self, app: web.Application, make_front: Callable[[], Front], *, shutdown_timeout: float) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._make_front = make_front

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application up
        return self._make_front()
