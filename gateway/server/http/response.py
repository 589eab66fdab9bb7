"""Writes answers to the connection's transport.

An answer is framed by its length, else by chunks, else (HTTP/1.0) by the end of the connection; if such an answer breaks off,
the connection is reset. The client's connection (`connection.py`) pauses and resumes the replica's.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import struct
import time
from http import HTTPStatus
from typing import Final, Protocol

from gateway.request.client import ClientReply
from gateway.upstream.client import PausableSource

MAX_JOINED: Final = 1 << 16  # bytes; a body up to this size is written in one buffer with the head

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: closing resets
_BODILESS: Final = frozenset([204, 304])
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(4096)]  # of nearly all chunks: to format one takes longer
_REASONS: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


class Dates:
    """The Date header's line, made once a second."""

    __slots__ = ("_line", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self, now: float) -> bytes:
        if int(now) != self._second:
            self._second = int(now)
            self._line = b"Date: %b\r\n" % email.utils.formatdate(now, usegmt=True).encode()
        return self._line


_dates = Dates()


def cut_connection(transport: asyncio.Transport, *, until_end: bool) -> None:
    """Drops a connection within an answer. until_end: the answer lasts as long as the connection, which is then reset, because
    a regular end would look like the end of a complete answer.
    """
    if until_end:
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:  # of uvloop: closed already
            with contextlib.suppress(OSError, ValueError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def _chunk(data: bytes) -> bytes:
    size = len(data)
    line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
    return b"".join((line, data, b"\r\n"))


class ReplyConnection(Protocol):
    """The part of the client's connection that a reply uses. source: the replica's answer to be paused. reply: the reply that
    has begun.

    writing_paused: the client does not read. drained: waits until it reads; raises ConnectionError if it disconnects.
    """

    source: PausableSource | None
    reply: HttpReply | None
    writing_paused: bool
    transport: asyncio.Transport | None

    async def drained(self) -> None: ...


class HttpReply(ClientReply):
    """One answer on one connection."""

    def __init__(
        self,
        connection: ReplyConnection,
        *,
        http11: bool,
        to_head: bool,
        keep_alive: bool,
        patience_s: float,
    ) -> None:
        """http11: the client speaks HTTP/1.1, else 1.0. to_head: the request was a HEAD. keep_alive: the connection may be
        reused. patience_s: time limit for the client to read.
        """
        super().__init__()
        self._connection = connection
        self._transport = connection.transport
        self._http11 = http11
        self._to_head = to_head
        self._patience_s = patience_s
        self._chunked = self._until_end = False  # the framing of the body
        self.keep_alive = keep_alive

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        http11 = self._http11
        if status in _BODILESS:
            framing = b""
        elif length is not None:
            framing = b"Content-Length: %d\r\n" % length
        elif http11:
            framing = b"Transfer-Encoding: chunked\r\n"
            self._chunked = True
        else:
            framing = b""
            self._until_end = True
            self.keep_alive = False
        if not self.keep_alive:
            framing += b"Connection: close\r\n"
        elif not http11:
            framing += b"Connection: keep-alive\r\n"
        start = b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b""))
        if status in _BODILESS or self._to_head:
            first, self._chunked = b"", False
        elif self._chunked and first:
            first = _chunk(first)
        self.begun = True
        self._connection.reply = self
        apart = len(first) > MAX_JOINED  # then it is written separately, without a copy
        server = b"Server: warmroute\r\n\r\n"
        self._write(b"".join((start, headers, framing, _dates.line(time.time()), server, b"" if apart else first)))
        if apart:
            self._write(first)

    def write(self, data: bytes) -> None:
        if data:
            self._write(_chunk(data) if self._chunked else data)

    def end(self, last: bytes = b"") -> None:
        if self._chunked:
            self._write(_chunk(last) + b"0\r\n\r\n" if last else b"0\r\n\r\n")
        elif last:
            self._write(last)

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def flows(self) -> bool:
        return self._transport is not None and not self._transport.get_write_buffer_size()

    def cut(self) -> None:
        self.keep_alive = False
        if self._transport:
            cut_connection(self._transport, until_end=self._until_end)

    def feed_from(self, answer: PausableSource | None) -> None:
        self._connection.source = answer
        if answer and self._connection.writing_paused:
            answer.pause()

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client left")
        self._transport.write(data)

    async def flushed(self) -> None:
        if not self._connection.writing_paused:
            return
        try:
            async with asyncio.timeout(self._patience_s):
                await self._connection.drained()
        except TimeoutError:
            self.cut()

    def __repr__(self) -> str:
        return f"<HttpReply {'begun' if self.begun else 'not begun'}, {'chunked' if self._chunked else 'plain'}>"
