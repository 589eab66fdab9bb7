"""The server that knows nothing but the public API: aiohttp's runner and connections, asyncio's protocols.

It answers what `http/connections.py` answers. What it does not have: the fast path; a bound on what all connections together
have read ahead (each has aiohttp's own); answers of our shape to what is not HTTP; answers to clients that have closed their
sending side; idle connections that make room for operators; another `limits.client_idle_s` after a reload (it is read once).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget, MemoryLease, client_of
from gateway.config.live import Live
from gateway.errors import GatewayError
from gateway.server.bounds import MAX_HEADER_BYTES, MAX_UNCHARGED
from gateway.server.errors import last_response, raw_response
from gateway.server.fallback.reply import QueuedReply
from gateway.server.fallback.request import HELD, Held
from gateway.server.http.ambiguity import SPOKEN, refusal_of
from gateway.server.http.response import cut_connection

_HEAD_END: Final = b"\r\n\r\n"
WRITTEN_AHEAD: Final = 64 << 10  # bytes that aiohttp writes to a client that does not keep up before it waits

Handler = Callable[[web.Request], Awaitable[Any]]


class Door(asyncio.Protocol):
    """Around aiohttp's protocol of one connection: counts the connection, or refuses it, and charges what it does not read."""

    def __init__(
        self,
        budget: Budget,
        connection_limit: ConnectionLimit,
        busy: Callable[[], bytes],
        make: Callable[[], asyncio.Protocol],
    ) -> None:
        """busy: the answer to a connection too many."""
        self._budget = budget
        self._connection_limit = connection_limit
        self._busy = busy
        self._make = make
        self._inner: asyncio.Protocol | None = None
        self._client = ""
        self._transport: asyncio.Transport | None = None
        self._unread: MemoryLease | None = None  # of answers in the transport's buffer, while the client does not keep up
        self._end = b""  # the last bytes that have come

    @property
    def sent_early(self) -> bool:
        """Whether anything has come behind the request for an upgrade that is being answered: it has no body."""
        return self._end != _HEAD_END

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        client = client_of(made.get_extra_info("peername"))
        if not self._connection_limit.admit(client):
            made.write(self._busy())
            made.close()
            return
        made.set_write_buffer_limits(MAX_UNCHARGED)
        self._client = client
        self._transport = made
        self._inner = self._make()
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner:
            self._inner.connection_lost(exc)
            self._inner = self._transport = None
            self._connection_limit.release(self._client)
        self._release_unread()

    def data_received(self, data: bytes) -> None:
        if self._inner:
            self._end = (self._end + data[-len(_HEAD_END) :])[-len(_HEAD_END) :]
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner else None

    def pause_writing(self) -> None:
        """The client does not keep up: charge what is written, and what aiohttp writes before it waits."""
        if self._inner and self._transport:
            self._inner.pause_writing()
            self._unread = self._budget.lease(self._client)
            if not self._unread.grow(max(self._transport.get_write_buffer_size(), WRITTEN_AHEAD)):
                cut_connection(self._transport, until_end=True)

    def resume_writing(self) -> None:
        if self._inner:
            self._inner.resume_writing()
        self._release_unread()

    def _release_unread(self) -> None:
        if self._unread:
            self._unread.close()
            self._unread = None


class PublicRunner(web.AppRunner):
    """Starts and ends the application, and serves it. Its outermost middleware has to be `held_by`."""

    def __init__(
        self,
        app: web.Application,
        *,
        live: Live,
        budget: Budget,
        connection_limit: ConnectionLimit,
        refusal: Callable[[], GatewayError],
        shutdown_timeout: float,
    ) -> None:
        """budget: of answers that clients do not read. connection_limit: of connections; refusal: what one too many
        is answered.
        """
        super().__init__(
            app,
            shutdown_timeout=shutdown_timeout,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=live.config.limits.client_idle_s,
            max_field_size=MAX_HEADER_BYTES,
            auto_decompress=False,  # `http/body.py` does, with bounds
        )
        self._budget = budget
        self._connection_limit = connection_limit
        self._refusal = refusal

    @property
    def protocols(self) -> Callable[[], asyncio.Protocol]:
        """Makes the protocol of one connection. After `setup`."""
        server = self.server
        assert server is not None
        return lambda: Door(self._budget, self._connection_limit, lambda: raw_response(self._refusal()), server)

    def close_idle(self) -> bool:
        """See `CloseIdle`. aiohttp does not show which are idle: they are closed at the end."""
        return False


def held_by(budget: Budget) -> Any:
    """A middleware: gives each request what it is to hold, and lets aiohttp write its answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.version not in SPOKEN:
            return last_response(GatewayError(505, "http_version", "The gateway speaks HTTP/1.1 and HTTP/1.0."))
        if error := refusal_of(request):
            return last_response(error)
        request[HELD] = held = Held(request, budget)
        try:
            answer = await handler(request)
            return await answer.finish() if isinstance(answer, QueuedReply) else answer
        finally:
            held.close()

    return middleware
