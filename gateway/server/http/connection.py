"""One client's connection: aiohttp's, with bounds, our error format, and a fast path for plain requests.

A connection may carry plain and other requests. Bytes go either to `fast_path.py` or to aiohttp's parser; the fast path takes a
plain request only if that parser is known to be between two messages: it was fed nothing yet, or only whole messages, one at a
time and by the same strict parsing, and all were answered. The internals of aiohttp that this relies on are in
`aiohttp_seam.py`, which checks at start that they exist; `test_connections.py` and `test_ingress.py` check their meaning.

A client that closes its sending side gets its answer, unless it has closed its socket (`half_closed.py`). Detecting that takes
interim responses, so an HTTP/1.0 client that closes its sending side is treated as gone. An answer to an incomplete request is
followed by a lingering close: the rest is read and dropped for a while, because closing a connection with unread bytes resets
it, and the client might lose the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget, MemoryLease, client_of
from gateway.config.addresses import is_local
from gateway.dialects.table import DIALECTS
from gateway.server import aiohttp_seam
from gateway.server.aiohttp_seam import as_1_1
from gateway.server.bounds import MAX_UNCHARGED
from gateway.server.errors import last_response
from gateway.server.http.bounded_parser import BoundedParser, error_of, forget_frames
from gateway.server.http.fast_path import FastPath
from gateway.server.http.half_closed import HalfClosed, speaks_1_1, until_gone
from gateway.server.http.plain_request import RequestStart, read_head
from gateway.server.http.response import HttpReply, cut_connection
from gateway.turns import Late, turns_of
from gateway.upstream.client import Source

log = logging.getLogger("warmroute.gateway")

FAST_PATHS: Final = frozenset([path for path, dialect in DIALECTS.items() if dialect.strict])
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ConnectionServer(Protocol):
    """What a connection needs of its server. handler: answers a plain request. fast_paths: paths of plain requests.

    max_body: bytes; a longer one is refused.
    """

    handler: Callable[[Any], Awaitable[Any]]
    fast_paths: frozenset[str]
    budget: Budget
    connection_limit: ConnectionLimit
    half_closed: HalfClosed

    @property
    def max_body(self) -> int: ...
    @property
    def busy(self) -> bytes: ...
    def admit(self, client: str) -> bool: ...


class ClientConnection(aiohttp_seam.AiohttpConnection):
    """One client's connection.

    source: the replica's answer that is streamed to it, paused while the client does not read. reply: the answer to the current
    request, once it has begun. lease: of aiohttp's current request. local: the client is on this machine.
    """

    __slots__ = (
        "_bounded",
        "_client",
        "_fast",
        "_fd",
        "_flush",
        "_gone",
        "_half_closed",
        "_late",
        "_lent",
        "_lost_track",
        "_server",
        "_unread",
        "lease",
        "local",
        "reply",
        "source",
    )

    def __init__(self, server: ConnectionServer, **options: Any) -> None:
        super().__init__(cast(web.Server, server), **options)
        # aiohttp's parser may overcount by one and stops at this bound, but is resumed only after the queue was full: with a
        # smaller bound the queue is full by then.
        self.max_messages -= 1
        self._server = server
        self._fast = FastPath(self, server.handler, self.loop)
        self._bounded: BoundedParser | None = None
        self._lent = False  # aiohttp was fed a message that may be unanswered
        self._lost_track = False  # aiohttp was fed bytes whose message end is unknown
        self._late = Late(turns_of(self.loop))  # deferred input for aiohttp
        self._half_closed = False  # the client has closed its sending side
        self._gone: asyncio.Future[None] | None = None  # while the connection lingers
        self._client = ""  # unit of fairness; "" before it is admitted and after its end
        self._fd = -1
        self._flush: asyncio.TimerHandle | None = None  # aborts a closed connection whose client does not read
        self._unread: MemoryLease | None = None  # of answers in the transport's buffer, while the client does not keep up
        self.lease: MemoryLease | None = None
        self.local = False
        self.reply: HttpReply | None = None
        self.source: Source | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername")
        client = client_of(peer)
        if not self._server.admit(client):
            refused = cast(asyncio.Transport, transport)  # uvloop's is no subclass
            refused.write(self._server.busy)
            refused.close()
            return
        cast(asyncio.Transport, transport).set_write_buffer_limits(MAX_UNCHARGED)
        self._client = client
        self.local = is_local(peer)
        lease = self._server.budget.lease(client)
        self._fast.account = lease.account
        self._bounded = BoundedParser(self.parser, lease)
        self.parser = self._bounded  # has all that aiohttp uses
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._fd >= 0:
            self._server.half_closed.forget(self._fd)
        super().connection_lost(exc)
        if self._flush:
            self._flush.cancel()
        if self._client:
            self._server.connection_limit.release(self._client)
            self._client = ""
        self._fast.lost()
        if self._bounded:
            self._bounded.lost()
            self._bounded = None  # it refers to the parser, and that to this connection
        if self.lease:
            self.lease.close()
        forget_frames(self.messages)
        self._late.clear()
        self._release_unread()
        self._end_linger()

    @property
    def client(self) -> str:
        """The client, for fairness; "": the connection is not counted."""
        return self._client

    @property
    def sent_early(self) -> bool:
        """Whether anything has come behind the request for an upgrade that is being answered."""
        return self._bounded is None or self._bounded.sent_early or self._late.waits()

    @property
    def idle(self) -> bool:
        """Whether no request is being handled or answered, and the next one's head is incomplete."""
        waits = self.waiter is not None and not self.waiter.done()
        return waits and not self.messages and self._fast.request is None and not self._late.waits()

    def make_room(self, client: str) -> None:
        """Close this connection in favour of a new one of `client`."""
        self._server.connection_limit.replace(self._client, client)
        self._client = ""
        self._abort()

    def data_received(self, data: bytes) -> None:
        if self._fast.request is not None:
            self._fast.feed(data)
            return
        if not data:  # aiohttp itself, which resumes its parser
            self._feed_aiohttp(data)
            return
        begun = None if self._lost_track else read_head(data)
        if begun and self._ours(begun) and not self._at_work():
            if not (self.closes_at_once or self.closes):
                self._fast.begin(begun, data)
            return
        self._lent, self._lost_track = True, begun is None or len(data) != begun.end + begun.length
        if self._late.waits():
            self._late.add(data)
            return
        self._feed_aiohttp(self._late.first(data))
        if self._late.waits():
            self.pause_transport()
            self.resume_transport()

    def _feed_aiohttp(self, data: bytes) -> None:
        """Feed bytes to aiohttp."""
        if self.upgraded and self._bounded:
            self._bounded.sent_early = True
        super().data_received(data)
        if self._bounded:
            if self._bounded.note_paused(self._late.held + (len(data) if self._full() or self.upgraded else 0)):
                super().data_received(b"")  # so that aiohttp answers with the error that it raises
            if self._bounded.closed:  # drops all further input
                self._late.clear()
        if self.buffer_paused:
            self._watch(self._ended_unread)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls it for each piece of a body that it reads.
        if self.reading_paused or (self._bounded and self._bounded.paused):
            super().resume_reading(resume_parser)

    def resume_transport(self) -> None:
        """Deferred input is fed first."""
        if not self._late.waits():
            super().resume_transport()
            self._end_if_incomplete()
        elif not self._full():
            self._late.schedule(self._next_turn)

    def _full(self) -> bool:
        """Whether aiohttp has paused its input."""
        return self.reading_paused or self.buffer_paused

    def _next_turn(self) -> None:
        self._late.due()
        if not self._full():
            for part in self._late.turn():
                self._feed_aiohttp(part)
                if self._full():
                    return
            self.resume_transport()

    def _ours(self, begun: RequestStart) -> bool:
        head = begun.head
        return head.target in self._server.fast_paths and head.method == "POST" and 0 < begun.length <= self._server.max_body

    def _at_work(self) -> bool:
        """Whether aiohttp has unanswered input."""
        if self._lent:
            self._lent = bool(self.messages) or self.waiter is None or self.waiter.done()
        return self._lent or self._late.waits()

    def served(self, pipelined: bytes, *, keep: bool) -> None:
        """End of a plain request. pipelined: bytes after it; keep: the connection may be reused."""
        self.reply = None
        if not keep:
            self.force_close()
            return
        self.idle_until = self.loop.time() + self.idle_s
        if pipelined:
            self.data_received(pipelined)
        plain = self._fast.request
        if self._half_closed and not (plain.complete if plain else self._at_work()):
            self.force_close()  # nothing is left to be answered, or its body stays incomplete

    def hold(self, *, on: bool) -> None:
        """Pause reading: too many pipelined bytes are buffered. on=False: resume."""
        if self.transport and not self.transport.is_closing() and not self._half_closed:
            if on:
                self.transport.pause_reading()
                self._watch(self._ended_unread)
            else:
                self.transport.resume_reading()

    # -- requests that aiohttp reads

    def begin_request(self) -> MemoryLease:
        """The next request's turn: returns its lease."""
        assert self._bounded is not None
        self.lease = lease = self._bounded.next_request()
        self._end_if_incomplete()
        return lease

    def _end_if_incomplete(self) -> None:
        """Close if the client has closed its sending side within the body of the current request."""
        request = self.current_request
        if self._half_closed and request and not (self._late.waits() or request.content.is_eof()) and self.transport:
            self.transport.close()  # after the answers before it

    async def finish_response(
        self, request: web.BaseRequest, answer: Any, begun: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the rest of the answer, and wait until the client has read it."""
        try:
            async with asyncio.timeout(
                None if isinstance(answer, HttpReply) else self.idle_s
            ):  # an HttpReply has its own timeout
                finished = await super().finish_response(request, answer, begun)
            if isinstance(answer, web.Response):
                answer.body = None  # aiohttp keeps a connection's last answer while it is idle
            self.reply = None
            if self.lease:
                self.lease.drop_body()  # its head stays in memory while the connection lingers
            if not (self.messages or self._late.waits()):
                await self._end_if_last()
            return finished
        except TimeoutError:
            self._abort()
            return answer, True
        finally:
            if self.lease:
                self.lease.close()
            self.lease = self.reply = None

    async def _end_if_last(self) -> None:
        """Close the connection if no other request can come."""
        if self._bounded and self._bounded.closed:
            await self.linger()
            self.close()
        elif self._half_closed:
            self.close()

    # -- the end of a connection

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's says None: it has no half-closed connections
        """The client has closed its sending side. True: keep the transport, for an outstanding answer."""
        self._end_linger()
        if not (self._half_closed or self._awaits_answer()):
            return False
        self._half_closed = True
        if not self._watch(None):
            return False
        self._probe()
        if not self._fast.request and not self.messages:
            self.close()  # after the answer
        return True

    async def start(self) -> None:
        """aiohttp's loop over requests; closes the connection at its end."""
        try:
            await super().start()
        finally:
            self.reply = None  # of a cancelled request; breaks a cycle
            self._bound_flush(self.transport)

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._bound_flush(transport)

    def _bound_flush(self, transport: asyncio.Transport | None) -> None:
        """Bound how long a closed transport waits for its client to read: the idle time. Then the connection is reset, for an
        answer without a length would look complete.
        """
        if transport and self._flush is None and transport.is_closing() and transport.get_write_buffer_size():
            self._flush = self.loop.call_later(self.idle_s, partial(cut_connection, transport, until_end=True))

    def _watch(self, ended: Callable[[], None] | None) -> bool:
        """Watch for a reset by the client. ended: called when it closes its sending side."""
        if self.transport is None or self.transport.is_closing():
            return False
        if self._fd < 0:
            self._fd = self.transport.get_extra_info("socket").fileno()
        return self._server.half_closed.watch(self._fd, self._abort, ended)

    def _probe(self) -> None:
        """Write bytes without meaning; a client that has closed its socket answers with a reset."""
        if self.reply:
            self.reply.probe()
        elif self.transport and (self._fast.request or speaks_1_1(self.current_request)):
            self.transport.write(CONTINUE)

    def _ended_unread(self) -> None:
        """The client has closed its sending side, on a paused connection."""
        if self._awaits_answer():
            self._probe()
        else:
            self._abort()

    def _awaits_answer(self) -> bool:
        """Whether a complete request of an HTTP/1.1 client is unanswered."""
        if plain := self._fast.request:
            return plain.complete
        if request := self.current_request:
            return speaks_1_1(request) and request.content.is_eof()
        return self._at_work()

    def _abort(self) -> None:
        """Drop the connection at once."""
        if self.reply:
            self.reply.cut()
        elif self.transport:
            self.transport.abort()

    async def linger(self) -> None:
        """After the last answer: read and drop further input until the client closes its sending side."""
        if self.transport and not (self.transport.is_closing() or self._half_closed):
            self._gone = self.loop.create_future()
            await until_gone(self.transport, self._gone)

    def _end_linger(self) -> None:
        if self._gone and not self._gone.done():
            self._gone.set_result(None)

    def check_idle(self) -> None:
        if (
            self._fast.request is not None or self._late.waits()
        ):  # aiohttp knows neither, and would treat the connection as idle
            self.idle_until = self.loop.time() + self.idle_s
        super().check_idle()

    def pause_writing(self) -> None:
        """The client does not keep up: pause the replica, and charge the write buffer."""
        super().pause_writing()
        if self.source:
            self.source.pause()
        if self.transport and self._fast.account and not self._unread:
            self._unread = self._fast.account.lease()
            if not self._unread.grow(self.transport.get_write_buffer_size()):
                self._abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.source:
            self.source.resume()
        self._release_unread()

    def _release_unread(self) -> None:
        if self._unread:
            self._unread.close()
            self._unread = None

    def log_exception(self, *args: Any, **options: Any) -> None:
        """No traceback for an unread body that cannot be decoded: the client's fault."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer invalid HTTP once, in our error format, without a traceback: the client's fault."""
        if isinstance(exc, HttpProcessingError):
            as_1_1(request)
            exc.__traceback__ = None  # its frames hold the input, and the connection may linger
        return last_response(error_of(status, exc, message))
