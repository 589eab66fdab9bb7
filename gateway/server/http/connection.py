"""One client's connection: the only HTTP/1.1 server for clients.

    idle ── head complete ──► receiving ── body complete ──► answering ── answered ──► idle
      │                           └──── answered before its end ────┐         └──────► closing (it was the last answer)
      └── no valid head ──────────────────────────────────────────► lingering ───────► closing
                                                    answering ── 101 ──► upgraded (websocket/takeover.py)

idle: `_buffer` has the beginning of a head, or nothing. receiving, answering: `_request` is served by `_task`; bytes behind its
body wait in `_buffer`, and beyond MAX_PIPELINED reading is paused. lingering: the last answer is written, and further bytes
from the client are read and dropped for LINGER_S, because closing a connection with unread bytes resets it, and the client
might lose the answer. A last answer with further requests behind it lingers, too.

Requests of one connection are served one after the other, in their order. All received bytes are charged to the memory budget:
a head and a body to the lease of their request, others to the connection's lease. If the budget refuses them, the connection
ends with the current answer.

Chunks cost work for their number and not for their length: they are parsed in turns with other connections (`turns.py`).

If a client closes its side, it has left: its request is cancelled, unless its answer is kept (`AnswerKeeper`). A paused
connection does not notice that, so the state of its socket is polled while it is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, cast

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget, MemoryLease, client_of
from gateway.config.addresses import is_local
from gateway.dialects.openai.errors import error_body
from gateway.errors import GatewayError, over_budget
from gateway.request.client import ClientReply
from gateway.server.errors import error_lines
from gateway.server.http.request import HttpRequest
from gateway.server.http.request_head import HEAD_COPIES, MAX_HEAD_BYTES, RequestStart, check_begin, read_head
from gateway.server.http.response import HttpReply, cut_connection
from gateway.turns import DeferredData, turns_of
from gateway.upstream.client import PausableSource

MAX_PIPELINED: Final = 1 << 16  # bytes behind a request; one read more may come before the connection is paused
MAX_UNCHARGED: Final = 8 << 10  # bytes in the write buffer that are not charged
LINGER_S: Final = 10.0
LOOK_S: Final = 0.5  # interval of polling the socket of a paused connection
_LINE_ENDS: Final = frozenset([b"\r", b"\n"])
_LEFT: Final = frozenset([7, 8])  # TCP_CLOSE, TCP_CLOSE_WAIT: states of a socket whose client has closed its side

Handler = Callable[[HttpRequest], Awaitable[ClientReply]]


class ConnectionServer(Protocol):
    """The part of its server that a connection uses. fast_paths: a POST to one of them goes to `fast_handler`, others to
    `handler`.

    max_body: bytes; a longer body is refused. idle_s: limit on the time that a connection is idle or sends a request's head.
    """

    handler: Handler
    fast_handler: Handler
    fast_paths: frozenset[str]
    for_operators: bool
    budget: Budget
    connection_limit: ConnectionLimit

    @property
    def max_body(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    @property
    def busy(self) -> bytes: ...
    def admit(self, client: str) -> bool: ...
    def add(self, connection: ClientConnection) -> None: ...
    def discard(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client's connection (see the module).

    transport: None before and after the connection. source: the answer of the replica, paused while the client does not read.
    reply: the answer to the current request, once it has begun. client: the unit of fairness, "": the connection is not
    counted. local: the client is on this machine.
    """

    __slots__ = (
        "_buffer",
        "_drain_waiter",
        "_ends",
        "_flush",
        "_gone",
        "_held",
        "_idle_s",
        "_idle_until",
        "_late",
        "_lease",
        "_look",
        "_loop",
        "_request",
        "_server",
        "_task",
        "_timer",
        "_unread",
        "client",
        "local",
        "reply",
        "source",
        "transport",
        "writing_paused",
    )

    def __init__(self, server: ConnectionServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._request: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._buffer = bytearray()  # one buffer, because data may arrive byte by byte
        self._lease: MemoryLease | None = None  # of _buffer and of deferred data
        self._late: DeferredData | None = None  # chunks to be parsed later
        self._held = False  # reading is paused: _buffer is full
        self._ends = False  # the current answer is the last one: further input is dropped
        self._gone: asyncio.Future[None] | None = None  # while it lingers
        self._drain_waiter: asyncio.Future[None] | None = None
        self._idle_s = self._idle_until = 0.0
        self._timer: asyncio.TimerHandle | None = None  # checks if it is idle for too long
        self._look: asyncio.TimerHandle | None = None  # polls the socket while reading is paused
        self._flush: asyncio.TimerHandle | None = None  # drops a closed connection whose client does not read
        self._unread: MemoryLease | None = None  # of answers in the transport's buffer, while the client does not read
        self.transport: asyncio.Transport | None = None
        self.client = ""
        self.local = False
        self.writing_paused = False
        self.reply: HttpReply | None = None
        self.source: PausableSource | None = None

    # -- for others

    @property
    def for_operators(self) -> bool:
        return self._server.for_operators

    @property
    def max_body(self) -> int:
        return self._server.max_body

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that serves the current request."""
        return self._task

    @property
    def idle(self) -> bool:
        """True if no request is being received or answered, and the next one's head is incomplete."""
        return self._task is None

    @property
    def sent_early(self) -> bool:
        """True if bytes have arrived behind the current request, or a part of its body is missing."""
        request = self._request
        return bool(self._buffer) or self._waits() or (request is not None and not request.complete)

    def close(self) -> None:
        """Close after the written bytes. The client has the idle time to read them; then the connection is reset, because an
        answer without a length would look complete.
        """
        transport = self.transport
        if transport is None or self._flush:
            return
        if not transport.is_closing():  # asyncio's transports of TLS break if they are closed twice
            transport.close()
        if transport.get_write_buffer_size():
            self._flush = self._loop.call_later(self._idle_s, partial(cut_connection, transport, until_end=True))

    def abort(self) -> None:
        """Close at once."""
        if self.reply:
            self.reply.cut()
        elif self.transport:
            self.transport.abort()

    def make_room(self, client: str) -> None:
        """Close this connection in favour of a new one of `client`."""
        self._server.connection_limit.replace(self.client, client)
        self.client = ""
        self.abort()

    async def drained(self) -> None:
        while self.writing_paused and self.transport is not None:
            self._drain_waiter = self._loop.create_future()
            await self._drain_waiter
        if self.transport is None:
            raise ConnectionResetError("the client left")

    # -- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        peer = made.get_extra_info("peername")
        client = client_of(peer)
        if not self._server.admit(client):
            made.write(self._server.busy)
            made.close()
            return
        made.set_write_buffer_limits(MAX_UNCHARGED)
        self.transport = made
        self.client = client
        self.local = is_local(peer)
        self._lease = self._server.budget.lease(client)
        self._idle_s = self._server.idle_s
        self._idle_until = self._loop.time() + self._idle_s
        self._timer = self._loop.call_at(self._idle_until, self._check_idle)
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lease is None:  # it was not admitted
            return
        self.transport = None
        self._server.discard(self)
        if self.client:
            self._server.connection_limit.release(self.client)
            self.client = ""
        for timer in (self._timer, self._look, self._flush):
            if timer:
                timer.cancel()
        if self._task and not self._goes_on(self._task):
            self._task.cancel()
        self._drop_input()
        self._lease.close()
        self._release_unread()
        self._wake(self._drain_waiter)
        self._wake(self._gone)

    def _goes_on(self, task: asyncio.Task[None]) -> bool:
        """True if the current request goes on without its client."""
        keeper = self._request.keeper if self._request is not None else None
        return keeper is not None and keeper.left(task)

    def eof_received(self) -> bool:
        """The client has left. False: the transport is closed."""
        self._wake(self._gone)
        return False

    def data_received(self, data: bytes) -> None:
        request, late = self._request, self._late
        if late is not None and late.waits():
            late.add(data)
            self._charge()
        elif request is None:
            if not self._ends:
                self._begin_with(data)
        elif request.head.chunked and not request.complete:
            self._receive_chunks(data)
        else:
            self._receive(data)

    def pause_writing(self) -> None:
        """The client does not read: pause the replica, and charge the write buffer."""
        self.writing_paused = True
        if self.source:
            self.source.pause()
        if self.transport and self._lease and not self._unread:
            self._unread = self._lease.account.lease()
            if not self._unread.grow(self.transport.get_write_buffer_size()):
                self.abort()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.source:
            self.source.resume()
        self._release_unread()
        self._wake(self._drain_waiter)

    def _release_unread(self) -> None:
        if self._unread:
            self._unread.close()
            self._unread = None

    def _wake(self, waiter: asyncio.Future[None] | None) -> None:
        if waiter and not waiter.done():
            waiter.set_result(None)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle for too long."""
        now = self._loop.time()
        if self._task is not None:
            self._idle_until = now + self._idle_s
        if now < self._idle_until:
            self._timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self.close()

    # -- input

    def _receive(self, data: bytes) -> None:
        """Handle parsed input in any state."""
        request = self._request
        if self._ends:
            return
        if request is None:
            self._begin_with(data)
        elif request.complete:
            self._keep(data)
        elif rest := request.feed(data):
            self._keep(rest)

    def _begin_with(self, data: bytes) -> None:
        """In state idle: serve the request at the start of the input, once its head is complete."""
        buffer = self._buffer
        if buffer:
            searched = max(0, len(buffer) - 3)
            buffer += data
            if buffer.find(b"\r\n\r\n", searched) < 0 and len(buffer) <= MAX_HEAD_BYTES:
                self._wait_for_head()
                return
            data = bytes(buffer)
            buffer.clear()
        if data[:1] in _LINE_ENDS:
            data = data.lstrip(b"\r\n")  # RFC 9112, section 2.2
        try:
            begun = read_head(data)
        except GatewayError as error:
            self._refuse(error, to_head=data.startswith(b"HEAD "))
            return
        if begun:
            self._begin(begun, data)
        else:
            buffer += data
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        size, lease = len(self._buffer), self._lease
        assert lease is not None
        try:
            check_begin(self._buffer)
        except GatewayError as error:
            self._refuse(error)
            return
        if not lease.resize(size * HEAD_COPIES):
            self._refuse(over_budget(size, lease.account.largest))

    def _begin(self, begun: RequestStart, data: bytes) -> None:
        lease = self._lease
        assert lease is not None
        if lease.held:
            lease.resize(0)
        head, end = begun.head, begun.end + begun.length
        rest = b""
        if len(data) > end:
            data, rest = data[:end], data[end:]
        self._request = request = HttpRequest(data, begun, self, lease.account.lease())
        server = self._server
        fast = head.method == "POST" and head.target in server.fast_paths
        handler = server.fast_handler if fast else server.handler
        self._task = asyncio.Task(self._serve(request, handler), loop=self._loop, name="request")
        if rest and head.chunked and not self._waits():
            self._receive_chunks(rest)
        elif rest and head.chunked:
            self._receive(rest)
        elif rest:
            self._keep(rest)

    def _receive_chunks(self, data: bytes) -> None:
        if self._late is None:
            self._late = DeferredData(turns_of(self._loop))
        late = self._late
        self._receive(late.first(data))
        if late.waits():
            self._charge()
        if late.waits() and self.transport:
            self.transport.pause_reading()
            late.schedule(self._next_turn)

    def _waits(self) -> bool:
        """True if there is input to be parsed later."""
        return self._late is not None and self._late.waits()

    def _next_turn(self) -> None:
        late = self._late
        assert late is not None
        late.due()
        if self.transport is None:
            return
        for part in late.turn():
            self._receive(part)
            if self._ends or self.transport is None:
                late.clear()
                break
        self._charge()
        if late.waits():
            late.schedule(self._next_turn)
        elif not self._held and self.transport and not self.transport.is_closing():
            self.transport.resume_reading()

    def _keep(self, data: bytes) -> None:
        """Store pipelined bytes until the current request is answered."""
        self._buffer += data
        self._charge()
        if len(self._buffer) > MAX_PIPELINED and not self._held and self.transport:
            self._held = True
            self.transport.pause_reading()
            if self._look is None:  # else the last polling is still running
                self._watch()

    def _charge(self) -> None:
        """Charge the bytes behind the current request, and deferred data, to the connection's lease."""
        lease, request = self._lease, self._request
        late = self._late.held if self._late is not None else 0
        if lease is None or lease.resize(len(self._buffer) + late):
            return
        if request is not None and not request.complete:
            request.refuse_unread(late)
        self._drop_input()  # its requests are not answered: the connection ends, and the client may repeat them

    def _drop_input(self) -> None:
        self._ends = True
        self._buffer.clear()
        if self._late is not None:
            self._late.clear()
        if self._lease is not None:
            self._lease.resize(0)
        self._release_hold()

    def _watch(self) -> None:
        """Poll while reading is paused: a client that has left ends the connection."""
        self._look = None
        if self.transport is None or not self._held or sys.platform != "linux":
            return
        sock = self.transport.get_extra_info("socket")
        if sock is None:  # of uvloop: closed
            return
        with contextlib.suppress(OSError):
            if sock.family != socket.AF_UNIX and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT:
                self.abort()
                return
        self._look = self._loop.call_later(LOOK_S, self._watch)

    def _release_hold(self) -> None:
        if self._held:
            self._held = False
            if self.transport and not self.transport.is_closing() and not self._waits():
                self.transport.resume_reading()

    # -- answers

    async def _serve(self, request: HttpRequest, handler: Handler) -> None:
        keep = False
        try:
            reply = await handler(request)
            if self.writing_paused:
                await reply.flushed()
            keep = reply.keep_alive and request.complete and not self._ends
            if not keep and (self._ends or self.sent_early):
                self._drop_input()
                if request.lingers:
                    await self._linger()
        except ConnectionError:
            pass  # the client has disconnected
        finally:
            request.close()
            self._request = self._task = self.reply = None
            self._served(keep=keep)

    def _served(self, *, keep: bool) -> None:
        if not keep:
            self.close()
            return
        if self.transport is None or self.transport.is_closing():
            return
        self._idle_until = self._loop.time() + self._idle_s
        if self._buffer:
            pipelined = bytes(self._buffer)
            self._buffer.clear()
            self._begin_with(pipelined)
        if len(self._buffer) <= MAX_PIPELINED:
            self._release_hold()

    def _refuse(self, error: GatewayError, *, to_head: bool = False) -> None:
        """Answer an invalid request, as the last answer of this connection."""
        self._drop_input()
        self._task = asyncio.Task(self._last_answer(error, to_head), loop=self._loop, name="refusal")

    async def _last_answer(self, error: GatewayError, to_head: bool) -> None:
        try:
            reply = HttpReply(self, http11=True, to_head=to_head, keep_alive=False, patience_s=self._idle_s)
            body = error_body(error)
            reply.begin(error.status, error_lines(error), length=len(body), first=body)
            await reply.flushed()
            await self._linger()
        except ConnectionError:
            pass  # the client has disconnected
        finally:
            self._task = self.reply = None
            self.close()

    async def _linger(self) -> None:
        """After the last answer: read and drop further input until the client closes its side."""
        transport = self.transport
        if transport is None or transport.is_closing() or not transport.can_write_eof():  # TLS reads on when it is closed
            return
        self._gone = self._loop.create_future()
        with contextlib.suppress(TimeoutError, OSError):  # OSError: the client has just disconnected
            transport.write_eof()
            async with asyncio.timeout(LINGER_S):
                await self._gone

    def __repr__(self) -> str:
        state = "closed" if self.transport is None else "ending" if self._ends else "idle" if self.idle else "busy"
        return f"<ClientConnection {state}, {self._request!r}, {len(self._buffer)} bytes wait>"
