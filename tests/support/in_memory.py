"""A gateway without a socket: a client and a replica that exchange bytes in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.admission.memory import Budget
from gateway.request.client import Caller, ClientReply, ClientRequest, caller_of
from gateway.upstream.client import PausableSource
from gateway.upstream.connection import Connection
from gateway.upstream.headers import Address

Answer = Callable[[bytes], list[bytes]]
"""A request's bytes -> its answer's bytes, piece by piece."""


class BytesReply(ClientReply):
    """Stores the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.headers = b""
        self.body = bytearray()
        self.whole = False

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun, self.status, self.headers = True, status, headers
        self.body += first
        self.whole = length is not None and length == len(first)

    def write(self, data: bytes) -> None:
        self.body += data

    def end(self, last: bytes = b"") -> None:
        self.body += last
        self.whole = True

    def cut(self) -> None:
        self.whole = False

    def feed_from(self, answer: PausableSource | None) -> None:
        """Nobody holds it back."""


class BytesRequest(ClientRequest):
    """A request with a complete body."""

    def __init__(self, body: bytes, path: str, **headers: str) -> None:
        self._fields = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__("POST", path, path, self._fields, Budget(1 << 30).lease("192.0.2.1"))
        self._body = body
        self.answer = BytesReply()

    def caller(self) -> Caller:
        return caller_of(self.headers)

    def upstream_headers(self) -> bytes:
        return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in self._fields.items())

    @property
    def here(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return True

    def take(self) -> bytes:
        return self._body

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> BytesReply:
        return self.answer


class MemoryTransport(asyncio.Transport):
    """The replica's side of one connection: answers each complete request at once."""

    def __init__(self, connection: Connection, answer: Answer) -> None:
        super().__init__()
        self._connection = connection
        self._answer = answer
        self._received = b""
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._received += bytes(data)
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        if blank and len(body) >= length:
            request, self._received = self._received, b""
            for number, piece in enumerate(self._answer(request)):
                asyncio.get_running_loop().call_later(0.001 * number, self._give, piece)

    def _give(self, piece: bytes) -> None:
        if not self._closing:
            self._connection.data_received(piece)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """Nothing waits."""

    def resume_reading(self) -> None:
        """Nothing waits."""

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)


class MemoryDials:
    """Connects to a replica that is a function."""

    def __init__(self, address: Address, answer: Answer) -> None:
        self._address = address
        self._answer = answer

    async def connect(self, timeout_s: float) -> Connection:
        connection = Connection(asyncio.get_running_loop())
        connection.connection_made(MemoryTransport(connection, self._answer))
        return connection

    def __repr__(self) -> str:
        return f"<MemoryDials {self._address.netloc}>"


def framed(body: bytes, kind: str = "application/json", close: bool = True) -> bytes:
    """A complete HTTP answer. close: it ends its connection, so that the connection is not reused."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return (head + ("Connection: close\r\n" if close else "") + "\r\n").encode() + body


def replica(answer: Callable[[Any], bytes]) -> Answer:
    """A replica that lists the model `m`, and answers all other requests by `answer` of the request's bytes."""

    def respond(request: bytes) -> list[bytes]:
        if request.startswith(b"GET /v1/models"):
            return [framed(b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"memory"}]}')]
        if request.startswith(b"GET "):
            return [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]
        return [answer(request)]

    return respond
