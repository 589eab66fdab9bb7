"""The server's front: aiohttp's connections, with bounds, our error shape, and a short way for the requests that are many.

aiohttp makes two tasks' work, a request with all its properties and a body's reader of every request, and its application
resolves routes and runs middlewares; for what is forwarded this costs as much as the rest of the gateway. So what is POSTed to
the paths in SHORT goes to its handler directly: past all of aiohttp if it is plain (`plain.py`, `short.py`), else past the
application. Everything else goes to the application.

A connection may bring requests of both kinds. Bytes go either to `short.py` or to aiohttp's parser, and a plain request is
taken only where that parser is known to stand between two messages: it was given nothing yet, or whole messages, one by one and
by the same strict reading, and has answered all of them. This is a seam with the insides of aiohttp's connection: `_waiter`,
`_messages`, `_close`, `_force_close`, its calls of `data_received` with nothing, and the time of its keep-alive timer.
`tests/gateway/test_front.py` fails where a release moves it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web

from gateway.addresses import is_loopback
from gateway.plain import Beginning, read_head
from gateway.reply import Reply
from gateway.short import ShortWay

if TYPE_CHECKING:
    from gateway.relay import Attempt

log = logging.getLogger("warmroute.gateway")

Handler = Callable[[Any], Awaitable[Any]]  # of a web.Request or a PlainRequest

SHORT = frozenset(["/v1/chat/completions", "/v1/completions"])
_NOTHING: frozenset[str] = frozenset()
SPOKEN = frozenset([HttpVersion10, HttpVersion11])  # aiohttp's parser takes HTTP/0.9 and 2.0 as well, and answers in kind
MAX_HEADER_BYTES = 64 << 10  # one header line: tokens and cookies can be long


class ClientConnection(web.RequestHandler):
    """One client's connection. source: the replica's answer that is being written to it; it is paused while nobody reads.
    local: the other end is on this machine.
    """

    __slots__ = ("_front", "_lent", "_lost_track", "_short", "local", "source")

    def __init__(self, front: Front, **options: Any) -> None:
        super().__init__(front, **options)
        self._front = front
        self._short = ShortWay(self, front.handler, self._loop)
        self._lent = False  # aiohttp was given a message, and may still be at it
        self._lost_track = False  # it was given bytes of which we do not know where their message ends
        self.local = False
        self.source: Attempt | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.local = _is_local(transport.get_extra_info("peername"))
        if self._front.full:
            refused = cast(asyncio.Transport, transport)  # uvloop's is no subclass
            refused.write(self._front.busy)
            refused.close()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._short.lost()

    def data_received(self, data: bytes) -> None:
        if self._short.request is not None:
            self._short.feed(data)
            return
        if not data:  # aiohttp itself, which asks its parser to go on
            super().data_received(data)
            return
        begun = None if self._lost_track else read_head(data)
        if begun and self._ours(begun) and not self._at_work():
            if not (self._force_close or self._close):
                self._short.begin(begun, data)
            return
        self._lent, self._lost_track = True, begun is None or len(data) != begun.end + begun.length
        super().data_received(data)

    def _ours(self, begun: Beginning) -> bool:
        head = begun.head
        return head.target in self._front.short and head.method == "POST" and 0 < begun.length <= self._front.max_body

    def _at_work(self) -> bool:
        """Whether aiohttp has still to answer what it was given."""
        if self._lent:
            self._lent = bool(self._messages) or self._waiter is None or self._waiter.done()
        return self._lent

    def served(self, behind: bytes, *, keep: bool) -> None:
        """A plain request is over. behind: what came after it; keep: the connection may be used again."""
        if not keep:
            self.force_close()
            return
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if behind:
            self.data_received(behind)

    def hold(self, *, on: bool) -> None:
        """Read no more for now: more has come behind a request than should wait."""
        if self.transport and not self.transport.is_closing():
            if on:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _process_keepalive(self) -> None:
        if self._short.request is not None:  # aiohttp does not see it, and would take the connection for idle
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.source:
            self.source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.source:
            self.source.resume()

    def log_exception(self, *args: Any, **options: Any) -> None:
        """A body that nobody wanted and that cannot be decoded is the client's fault: no reason for a traceback."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP is answered once, in our shape, and without a traceback: it is the client's fault."""
        why = (message or "it cannot be read").encode("ascii", "backslashreplace")  # it quotes what the client sent
        answer = self._front.refuse(status, why.decode())
        if status >= 500 and not isinstance(exc, ConnectionError):  # the client left: nobody's fault, and nobody reads this
            log.error("unhandled error", exc_info=exc)
        answer.force_close()
        return answer


def _is_local(peer: object) -> bool:
    """Of a socket's peer name: a tuple with the host first; of a Unix socket, a text."""
    return is_loopback(str(peer[0])) if isinstance(peer, tuple) else isinstance(peer, str | bytes)


class Front(web.Server):
    """Serves `app`; what is POSTed to the paths in SHORT goes to `handler` without the application's detours."""

    def __init__(
        self,
        app: web.Application,
        handler: Handler | None,
        *,
        refuse: Callable[[int, str], web.Response],
        max_connections: int,
        busy: bytes,
        idle_s: float,
    ) -> None:
        """handler: None: everything goes to the application. refuse: makes the answer to what is not HTTP. busy: the bytes for
        one connection too many. idle_s: for so long a connection may be idle, or be sending one request's head.
        """
        super().__init__(
            self._dispatch,  # type: ignore[arg-type]  # requests are made by the application
            request_factory=app._make_request,
            handler_cancellation=True,
        )
        self._app = app
        self.short = SHORT if handler else _NOTHING
        self.handler = handler or app._handle
        self._max_connections = max_connections
        self._idle_s = idle_s
        self.refuse = refuse
        self.busy = busy

    def bound(self, max_connections: int, busy: bytes, idle_s: float) -> None:
        """Other bounds; connections that are open stay, and keep theirs."""
        self._max_connections = max_connections
        self._idle_s = idle_s
        self.busy = busy

    @property
    def max_body(self) -> int:
        """Bytes; a longer one is refused."""
        return self._app._client_max_size

    @property
    def full(self) -> bool:
        return len(self._connections) >= self._max_connections

    def __call__(self) -> ClientConnection:
        return ClientConnection(
            self, loop=self._loop, access_log=None, keepalive_timeout=self._idle_s, max_field_size=MAX_HEADER_BYTES
        )

    async def _dispatch(self, request: web.Request) -> Any:
        if request.version not in SPOKEN:
            reply = Reply(request, keep_alive=False, patience_s=self._idle_s)
            reply.begin(505, b"", length=0)
            return reply
        expect = request.headers.get("Expect")
        if expect is not None and expect.lower() != "100-continue":
            return self._refused("the expectation is not known")
        # aiohttp's parser in Python, which is used where it was not compiled, quotes nothing.
        if not request.raw_path.isascii() and not request.rel_url.raw_path_qs.isascii():
            return self._refused("the target is not ASCII")
        if request.raw_path in self.short and request.method == "POST" and expect is None:
            return await self.handler(request)
        return await self._app._handle(request)

    def _refused(self, why: str) -> web.Response:
        """The connection ends with it: whether the request's body will still come is not known."""
        answer = self.refuse(400, why)
        answer.force_close()
        return answer


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
