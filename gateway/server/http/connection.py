"""One client's connection: aiohttp's, with bounds, our error shape, and a fast path for plain requests.

A connection may bring requests of both kinds. Bytes go either to `fast_path.py` or to aiohttp's parser, and a plain request is
taken only where that parser is known to stand between two messages: it was given nothing yet, or whole messages, one by one and
by the same strict reading, and has answered all of them. What that takes of aiohttp's insides is in `aiohttp_seam.py`, which
looks at the start whether it is there; what it means, `test_connections.py` and `test_ingress.py` hold.

A client that closes its sending side gets its answer, as long as it has not closed its socket (`half_closed.py`). Without
interim responses that cannot be told apart, so an HTTP/1.0 client that sends no more has left. An answer to a request that has
not arrived whole is followed by a lingering close: the rest is read and dropped for a while, because a connection that is
closed with unread bytes is reset, and the client might lose the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget, Lease, client_of
from gateway.config.addresses import is_local
from gateway.errors import GatewayError
from gateway.server import aiohttp_seam
from gateway.server.aiohttp_seam import as_1_1
from gateway.server.http.bounded_parser import BoundedParser, error_of, forget_frames
from gateway.server.http.fast_path import FastPath
from gateway.server.http.half_closed import HalfClosed, speaks_1_1, until_gone
from gateway.server.http.plain_request import Beginning, read_head
from gateway.server.http.response import HttpReply
from gateway.turns import Late, turns_of
from gateway.upstream.client import ReplicaAnswer

log = logging.getLogger("warmroute.gateway")

FAST_PATHS: Final = frozenset(["/v1/chat/completions", "/v1/completions"])
MAX_UNCHARGED: Final = 8 << 10  # bytes of answers that may wait for a client without being charged
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class ConnectionServer(Protocol):
    """What a connection needs of the server that makes it. handler: answers a plain request. fast_paths: of plain requests.

    max_body: bytes; a longer one is refused.
    """

    handler: Callable[[Any], Awaitable[Any]]
    fast_paths: frozenset[str]
    budget: Budget
    places: ConnectionLimit
    half_closed: HalfClosed

    @property
    def max_body(self) -> int: ...
    @property
    def busy(self) -> bytes: ...
    def admit(self, client: str) -> bool: ...
    def refuse(self, error: GatewayError) -> web.Response: ...


class ClientConnection(aiohttp_seam.Connection):
    """One client's connection.

    source: the replica's answer that is being written to it; it is paused while nobody reads. reply: the answer to the current
    request, once it has begun. lease: what aiohttp's current request holds. local: the other end is on this machine.
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
        # aiohttp's parser may count one message too many, and stops at this bound; it is asked to go on only after the queue
        # was full. So that is full one earlier.
        self.max_messages -= 1
        self._server = server
        self._fast = FastPath(self, server.handler, self.loop)
        self._bounded: BoundedParser | None = None
        self._lent = False  # aiohttp was given a message, and may still be at it
        self._lost_track = False  # it was given bytes of which we do not know where their message ends
        self._late = Late(turns_of(self.loop))  # of what aiohttp is to get
        self._half_closed = False  # the client sends no more
        self._gone: asyncio.Future[None] | None = None  # while the connection lingers
        self._client = ""  # what fairness goes by; "" before it is admitted and after its end
        self._fd = -1
        self._flush: asyncio.TimerHandle | None = None  # ends a connection that is closed and whose client does not read
        self._unread: Lease | None = None  # of answers that wait in the transport, while the client does not keep up
        self.lease: Lease | None = None
        self.local = False
        self.reply: HttpReply | None = None
        self.source: ReplicaAnswer | None = None

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
        self.parser = self._bounded  # as far as it is used, it is one
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._fd >= 0:
            self._server.half_closed.forget(self._fd)
        super().connection_lost(exc)
        if self._flush:
            self._flush.cancel()
        if self._client:
            self._server.places.release(self._client)
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
        """Whose connection it is, for fairness; "": it takes no place."""
        return self._client

    @property
    def idle(self) -> bool:
        """Whether it waits for a request: none is being handled or answered, and of the next one the head is not complete."""
        waits = self.waiter is not None and not self.waiter.done()
        return waits and not self.messages and self._fast.request is None and not self._late.waits()

    def make_room(self, client: str) -> None:
        """Close this connection, whose place a connection of that client takes at once."""
        self._server.places.replace(self._client, client)
        self._client = ""
        self._abort()

    def data_received(self, data: bytes) -> None:
        if self._fast.request is not None:
            self._fast.feed(data)
            return
        if not data:  # aiohttp itself, which asks its parser to go on
            self._lend(data)
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
        self._lend(self._late.first(data))
        if self._late.waits():
            self.pause_transport()
            self.resume_transport()

    def _lend(self, data: bytes) -> None:
        """Give bytes to aiohttp; what is late in the next turns of the event loop, as long as it takes them."""
        super().data_received(data)
        if self._bounded:
            if self._bounded.note_paused(self._late.held + (len(data) if self._full() or self.upgraded else 0)):
                super().data_received(b"")  # so that aiohttp answers what it raises
            if self._bounded.closed:  # it takes nothing more
                self._late.clear()
        if self.buffer_paused:
            self._watch(self._ended_unread)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # aiohttp calls it for each piece of a body that it reads.
        if self.reading_paused or (self._bounded and self._bounded.paused):
            super().resume_reading(resume_parser)

    def resume_transport(self) -> None:
        """What is late comes first."""
        if not self._late.waits():
            super().resume_transport()
            self._end_if_incomplete()
        elif not self._full():
            self._late.schedule(self._next_turn)

    def _full(self) -> bool:
        """Whether aiohttp takes no more for now."""
        return self.reading_paused or self.buffer_paused

    def _next_turn(self) -> None:
        self._late.due()
        if not self._full():
            for part in self._late.turn():
                self._lend(part)
                if self._full():
                    return
            self.resume_transport()

    def _ours(self, begun: Beginning) -> bool:
        head = begun.head
        return head.target in self._server.fast_paths and head.method == "POST" and 0 < begun.length <= self._server.max_body

    def _at_work(self) -> bool:
        """Whether aiohttp has still to answer what it was given."""
        if self._lent:
            self._lent = bool(self.messages) or self.waiter is None or self.waiter.done()
        return self._lent or self._late.waits()

    def served(self, behind: bytes, *, keep: bool) -> None:
        """A plain request is over. behind: what came after it; keep: the connection may be used again."""
        self.reply = None
        if not keep:
            self.force_close()
            return
        self.idle_until = self.loop.time() + self.idle_s
        if behind:
            self.data_received(behind)
        plain = self._fast.request
        if self._half_closed and not (plain.complete if plain else self._at_work()):
            self.force_close()  # nothing is left to be answered, or its body will never be whole

    def hold(self, *, on: bool) -> None:
        """Read no more for now: more has come behind a request than should wait."""
        if self.transport and not self.transport.is_closing() and not self._half_closed:
            if on:
                self.transport.pause_reading()
                self._watch(self._ended_unread)
            else:
                self.transport.resume_reading()

    # -- requests that aiohttp reads

    def begin_request(self) -> Lease:
        """Its turn has come."""
        assert self._bounded is not None
        self.lease = lease = self._bounded.next_request()
        self._end_if_incomplete()
        return lease

    def _end_if_incomplete(self) -> None:
        """The client sends no more, and the body of the current request is not whole: it has left."""
        request = self.current_request
        if self._half_closed and request and not (self._late.waits() or request.content.is_eof()) and self.transport:
            self.transport.close()  # after the answers before it

    async def finish_response(
        self, request: web.BaseRequest, answer: Any, begun: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer, or the rest of it, and wait until the client has taken it."""
        try:
            async with asyncio.timeout(None if isinstance(answer, HttpReply) else self.idle_s):  # an HttpReply has its own
                finished = await super().finish_response(request, answer, begun)
            if isinstance(answer, web.Response):
                answer.body = None  # aiohttp keeps the last answer of a connection for as long as that is idle
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
        """Close the connection, if no other request can come."""
        if self._bounded and self._bounded.closed:
            await self.linger()
            self.close()
        elif self._half_closed:
            self.close()

    # -- the end of a connection

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's says None: it has no half-closed connections
        """The client sends no more. True: it may still read, and has an answer to come."""
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
        """aiohttp's requests, one after the other; at its end the connection is closed."""
        try:
            await super().start()
        finally:
            self.reply = None  # of a request that was cancelled; they refer to each other
            self._bound_flush(self.transport)

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._bound_flush(transport)

    def _bound_flush(self, transport: asyncio.Transport | None) -> None:
        """A transport that is closed waits until the client has taken everything: from now on for the idle time at most."""
        if transport and self._flush is None and transport.is_closing() and transport.get_write_buffer_size():
            self._flush = self.loop.call_later(self.idle_s, transport.abort)

    def _watch(self, ended: Callable[[], None] | None) -> bool:
        """Notice when the client resets the connection. ended: to be called when it sends no more."""
        if self.transport is None or self.transport.is_closing():
            return False
        if self._fd < 0:
            self._fd = self.transport.get_extra_info("socket").fileno()
        return self._server.half_closed.watch(self._fd, self._abort, ended)

    def _probe(self) -> None:
        """Write something that means nothing, which a client that has left answers with a reset."""
        if self.reply:
            self.reply.probe()
        elif self.transport and (self._fast.request or speaks_1_1(self.current_request)):
            self.transport.write(CONTINUE)

    def _ended_unread(self) -> None:
        """The client sends no more, on a connection that is not read."""
        if self._awaits_answer():
            self._probe()
        else:
            self._abort()

    def _awaits_answer(self) -> bool:
        """Whether a whole request of a client that takes interim responses is not answered yet."""
        if plain := self._fast.request:
            return plain.complete
        if request := self.current_request:
            return speaks_1_1(request) and request.content.is_eof()
        return self._at_work()

    def _abort(self) -> None:
        """The client does not read any more."""
        if self.transport:
            self.transport.abort()

    async def linger(self) -> None:
        """After the last answer: read and drop what the client still sends, until it sends no more."""
        if self.transport and not (self.transport.is_closing() or self._half_closed):
            self._gone = self.loop.create_future()
            await until_gone(self.transport, self._gone)

    def _end_linger(self) -> None:
        if self._gone and not self._gone.done():
            self._gone.set_result(None)

    def check_idle(self) -> None:
        if self._fast.request is not None or self._late.waits():  # aiohttp sees neither, and would take it for idle
            self.idle_until = self.loop.time() + self.idle_s
        super().check_idle()

    def pause_writing(self) -> None:
        """The client does not keep up: hold the replica back, and charge what waits for the client."""
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
        """A body that nobody wanted and that cannot be decoded is the client's fault: no reason for a traceback."""
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is not HTTP is answered once, in our shape, and without a traceback: it is the client's fault."""
        if isinstance(exc, HttpProcessingError):
            as_1_1(request)
            exc.__traceback__ = None  # its frames hold what the client has sent, and the connection may linger
        return self._server.refuse(error_of(status, exc, message))
