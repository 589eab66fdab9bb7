"""A client's request, and the reception of its body.

    received bytes ──► (chunks decoded) ──► whole, or piece by piece into the inflater ──► `read`, `take`

The head and each piece of the body are charged to the request's lease as they arrive. A body beyond its limits, or beyond the
budget, is dropped with all further input of its connection, and `read` raises. A body exists once: after this object only the
upstream request refers to the bytes, so that they can be dropped while the answer is streamed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

from gateway.admission.memory import MemoryLease, holding, peak_of
from gateway.errors import GatewayError, over_budget
from gateway.request.client import Caller, ClientReply, ClientRequest, Headers, caller_of
from gateway.server.http.inflate import INFLATER_BYTES, THREAD_SLICE, Inflater
from gateway.server.http.request_head import CACHED_BYTES, HEAD_COPIES, UNKNOWN_CODING, HeaderFields, RequestStart, invalid_http
from gateway.server.http.response import HttpReply, ReplyConnection
from gateway.turns import turns_of
from gateway.upstream.headers import upstream_headers
from gateway.upstream.http1 import AnswerParser, FramingError, chunked_body

CREDENTIALS: Final = ("Authorization", "X-Api-Key")  # headers that must not be repeated
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
PIECE: Final = 64 << 10  # bytes of a compressed body
MIN_MAX_BODY: Final = 1 << 20  # minimum of limits.body_mb

_NO_PARAMETERS: Final[Mapping[str, str]] = {}
_UNREAD: Final = object()


class RequestConnection(ReplyConnection, Protocol):
    """The part of its connection that a request uses. local: the client is on this machine. for_operators: on the admin
    listener.
    """

    local: bool

    @property
    def for_operators(self) -> bool: ...
    @property
    def task(self) -> asyncio.Task[None] | None: ...
    @property
    def max_body(self) -> int: ...


class HttpRequest(ClientRequest):
    """One request. fields: its headers. parameters: of its route's path (`routing.py`)."""

    pulses = True
    action: dict[str, Any] | None = None  # of an operator: how it was authorized, and what its body asks for

    def __init__(self, data: bytes, begun: RequestStart, connection: RequestConnection, lease: MemoryLease) -> None:
        """data: the request's first bytes, none beyond its end; for a chunked body only its head."""
        head = begun.head
        super().__init__(head.method, head.path, head.target, head.fields, lease)
        self.head = head
        self.fields: HeaderFields = head.fields
        self.connection = connection
        self.parameters = _NO_PARAMETERS
        self._body = b""
        self._left = begun.end + begun.length - len(data)  # missing bytes; 1 for a chunked body
        self._whole: BytesIO | None = None  # received bytes of an incomplete body
        self._pieces: deque[bytes] | None = None  # received bytes of a compressed body
        self._chunks: AnswerParser | None = None
        self._refusal: GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._invited = False  # 100 Continue was sent to the client
        extra = 0
        if begun.end > CACHED_BYTES:  # it is not cached, so its bytes and fields belong to this request
            extra = begun.end * (HEAD_COPIES - 1)
        lease.head = begun.end + extra
        if head.chunked:
            self._left, self._chunks = 1, chunked_body()
        if begun.length > MIN_MAX_BODY and begun.length > connection.max_body:
            self._refuse(too_large(connection.max_body))
        elif not lease.grow(len(data) + extra) or (self._left and not self._may_come(begun.length)):
            self._refuse_size(begun.length)  # refused early, before the client sends it
        elif head.coding and head.coding != UNKNOWN_CODING:
            self._pieces = deque()
            self._store(data[begun.end :])
        elif self._left:
            self._whole = BytesIO()
            self._whole.write(data[begun.end :])
        else:
            self._body = data[begun.end :]

    @property
    def here(self) -> bool:
        return not self._left and self._refusal is None and not self.head.coding

    @property
    def complete(self) -> bool:
        return not self._left

    @property
    def attended(self) -> bool:
        return self.connection.transport is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        return self.connection.task

    @property
    def lingers(self) -> bool:
        """True if the connection may linger after the answer: only if the budget has room for the head."""
        return self.lease.held >= self.lease.head

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the target's query; the first value of a repeated one. O(query)."""
        return dict(reversed(parse_qsl(self.target.partition("?")[2], keep_blank_values=True)))

    def feed(self, data: bytes) -> bytes:
        """Take the missing bytes of the body. Returns the bytes behind the request."""
        if not self._left:
            return data
        if self._chunks is not None:
            return self._feed_chunks(self._chunks, data)
        piece = data if len(data) <= self._left else data[: self._left]
        self._left -= len(piece)
        self._add(piece, self._left)
        if not self._left:
            self._finish()
        return data[len(piece) :]

    def _feed_chunks(self, chunks: AnswerParser, data: bytes) -> bytes:
        """Parse chunks. After a refusal nothing more is read."""
        if self._refusal is not None:
            return b""
        try:
            piece = chunks.feed(data)
        except FramingError as error:
            self._refuse(invalid_http(str(error)))
            return b""
        self._add(piece, 0)
        if not chunks.complete:
            return b""
        self._left, self._chunks = 0, None  # the parser refers to the bytes behind the request
        self._finish()
        return chunks.rest

    def _add(self, piece: bytes, left: int) -> None:
        """Store a piece of the body. left: known number of bytes still missing."""
        if self._refusal is not None:
            return
        body = self.lease.held - self.lease.head + len(piece)
        if not self.lease.grow(len(piece)):
            self._refuse_size(body + left)
        elif self._whole is not None:
            self._whole.write(piece)
            if self._chunks is not None and self._whole.tell() > self.connection.max_body:
                self._refuse(too_large(self.connection.max_body))
        elif piece:
            self._store(piece)

    def _store(self, piece: bytes) -> None:
        """Store a piece of a compressed body."""
        if self._pieces is not None:
            self._pieces.extend(piece[at : at + PIECE] for at in range(0, len(piece), PIECE))
            self._wake()

    async def arrived(self) -> None:
        """Wait for the whole body. Raises GatewayError: 400 (broken chunks), 413, 503."""
        while self._left and self._refusal is None:
            await self._more()
        if self._refusal:
            raise self._refusal

    async def _more(self) -> None:
        """Wait for more bytes, the end, or a refusal."""
        if self.head.expects and not self._invited and self.connection.transport:
            self._invited = True
            self.connection.transport.write(CONTINUE)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        coding = self.head.coding
        if coding == UNKNOWN_CODING and not opaque:
            raise GatewayError(415, "unsupported_encoding", "The body's Content-Encoding is not gzip, deflate or identity.")
        try:
            async with asyncio.timeout(within_s):
                if self._pieces is not None:
                    with holding(self.lease, INFLATER_BYTES):
                        return await self._inflated(self._pieces, Inflater(coding, max_bytes))
                await self.arrived()
        except TimeoutError as late:
            text = f"The body did not arrive within {within_s:g} s (limits.body_s)."
            raise GatewayError(408, "request_timeout", text) from late
        return self.take()

    async def _inflated(self, pieces: deque[bytes], inflater: Inflater) -> bytes:
        """Decompress slice by slice while bytes arrive, in turns with other requests."""
        made, lease, turns = BytesIO(), self.lease, turns_of(asyncio.get_running_loop())
        client, in_thread = lease.account.client, partial(inflater.take, THREAD_SLICE)
        while True:
            if self._refusal:
                raise self._refusal
            if not pieces:
                if not self._left:
                    break
                await self._more()
                continue
            piece = pieces.popleft()
            inflater.feed(piece)
            while not inflater.idle:
                beyond = turns.exceeds_share(client)
                part = await (turns.outside(in_thread, client) if beyond else turns.take(inflater.take, client))
                if not lease.grow(len(part)):
                    raise over_budget(lease.held + len(part), lease.account.largest)
                made.write(part)
            lease.shrink(len(piece))
        inflater.finish()
        return made.getvalue()

    @property
    def local(self) -> bool:
        return self.connection.local

    def caller(self) -> Caller:
        """The caller that the head names. O(1) if the head is cached."""
        head = self.head
        if head.caller is None:
            head.caller = caller = caller_of(head.fields)
            caller.ambiguous = not head.fields.distinct and any(head.fields.repeats(name) for name in CREDENTIALS)
        return head.caller

    def derived(self, read: Callable[[Headers], Any]) -> Any:
        values = self.head.derived
        found = values.get(read, _UNREAD)
        if found is _UNREAD:
            values[read] = found = read(self.headers)
        return found

    def upstream_headers(self) -> bytes:
        head = self.head
        if head.upstream_lines is None:
            head.upstream_lines = upstream_headers(head.headers, encoded=head.coding == UNKNOWN_CODING)
        return head.upstream_lines

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> ClientReply:
        head, connection = self.head, self.connection
        made = HttpReply(
            connection,
            http11=head.http11,
            to_head=head.method == "HEAD",
            keep_alive=keep_alive and head.keep_alive,
            patience_s=patience_s,
        )
        return made if self.keeper is None else self.keeper.reply(made, size)

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def close(self) -> None:
        """End of the request: drop its body, even if the object is still referenced."""
        self._drop()
        if self.keeper is not None:
            keeper, self.keeper = self.keeper, None
            keeper.close()
        self.lease.close()

    def refuse_unread(self, size: int) -> None:
        """Refuse the request: the budget has no room for its unparsed bytes."""
        self._refuse_size(self.lease.held - self.lease.head + size)

    def _finish(self) -> None:
        if self._whole is not None:
            self._body, self._whole = self._whole.getvalue(), None  # no copy: BytesIO hands its buffer over
        self._wake()

    def _may_come(self, length: int) -> bool:
        """True if the budget has room for the rest of the body now."""
        lease = self.lease
        return peak_of(length) <= lease.account.largest and lease.fits(self._left)

    def _refuse_size(self, body: int) -> None:
        """Refuse the request for its size. body: the size of the whole body."""
        self._refuse(over_budget(peak_of(body), self.lease.account.largest, body))

    def _refuse(self, error: GatewayError) -> None:
        self._refusal = error
        self._drop()
        self.lease.drop_body()
        self.lease.grow(self.lease.head - self.lease.held)  # if there is room: see `lingers`
        self._wake()

    def _drop(self) -> None:
        self._whole, self._body = None, b""
        if self._pieces:
            self._pieces.clear()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def __repr__(self) -> str:
        return f"<HttpRequest {self.method} {self.path}, {f'{self._left} bytes to come' if self._left else 'complete'}>"


def too_large(limit: int) -> GatewayError:
    text = f"The body is larger than {limit >> 20} MiB (limits.body_mb). Send less, or raise the limit."
    return GatewayError(413, "request_too_large", text)
