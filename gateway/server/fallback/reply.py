"""An answer written by aiohttp: the request's life writes at once and never waits, aiohttp is awaited, so a queue is between.

    begin, write, end ──► queue ──► one task ──► StreamResponse: prepare, write, write_eof

While more than MAX_QUEUED bytes wait in the queue the replica is paused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from aiohttp import HttpVersion11, web

from gateway.request.client import ClientReply
from gateway.server.http.response import cut_connection
from gateway.upstream.client import Source

MAX_QUEUED: Final = 8 << 10
_BODILESS: Final = frozenset([204, 304])


class QueuedReply(ClientReply):
    """One answer to a request that aiohttp has read. `finish` or `close` it."""

    def __init__(self, request: web.Request, *, keep_alive: bool, patience_s: float) -> None:
        """keep_alive: whether the connection may be used again. patience_s: limit on waiting for the client to read."""
        super().__init__()
        self.keep_alive = keep_alive
        self._request = request
        self._patience_s = patience_s
        self._response: web.StreamResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes
        self._more = asyncio.Event()
        self._bodiless = request.method == "HEAD"
        self._until_end = False  # how the body is framed: by the end of the connection
        self._ended = False
        self._gone = False  # the client has left, or the connection was cut
        self._source: Source | None = None
        self._paused = False  # the source is

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self._response = response = web.StreamResponse(status=status)
        for line in headers.split(b"\r\n"):
            name, colon, value = line.partition(b":")
            if colon:
                response.headers.add(name.decode("ascii"), value.strip().decode("utf-8", "replace"))
        modern = self._request.version >= HttpVersion11
        if status in _BODILESS:
            self._bodiless = True
        elif length is not None:
            response.content_length = length
        elif modern:
            response.enable_chunked_encoding()
        else:
            self.keep_alive = False
            self._until_end = True
        if not self.keep_alive:
            response.force_close()
        self.begun = True
        self._task = asyncio.get_running_loop().create_task(self._run(response), name="reply")
        self.write(first)

    def write(self, data: bytes) -> None:
        if self._gone:
            raise ConnectionResetError("the client left")
        if data and not self._bodiless:
            self._queue.append(data)
            self._queued += len(data)
            self._more.set()
            self._hold_back()

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        self._ended = True
        self._more.set()

    def cut(self) -> None:
        self.keep_alive = False
        self._gone = True
        self._more.set()
        if self._request.transport:
            cut_connection(self._request.transport, until_end=self._until_end)

    def feed_from(self, answer: Source | None) -> None:
        self._go_on()
        self._source = answer
        self._hold_back()

    def _hold_back(self) -> None:
        if self._queued > MAX_QUEUED and self._source and not self._paused:
            self._paused = True
            self._source.pause()

    def _go_on(self) -> None:
        if self._paused and self._source:
            self._source.resume()
        self._paused = False

    async def _run(self, response: web.StreamResponse) -> None:
        try:
            await response.prepare(self._request)
            while not self._gone:
                while self._queue:
                    data = self._queue.popleft()
                    await response.write(data)
                    self._queued -= len(data)
                    if self._queued <= MAX_QUEUED:
                        self._go_on()
                if self._ended:
                    await response.write_eof()
                    return
                self._more.clear()
                await self._more.wait()
        except ConnectionError:
            self._gone = True
        finally:
            self._queue.clear()

    async def finish(self) -> web.StreamResponse:
        """Wait until the client has taken it, and give it to aiohttp."""
        if self._response is None or self._task is None:
            raise ConnectionResetError("nothing was answered")
        self._ended = True  # one with a length may be whole without `end`
        self._more.set()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._task
        except TimeoutError:
            self.cut()
        return self._response

    def close(self) -> None:
        """Idempotent. What is not written yet is dropped."""
        if self._task and not self._task.done():
            self._task.cancel()

    def __repr__(self) -> str:
        return f"<QueuedReply {'begun' if self.begun else 'not begun'}, {self._queued} bytes queued>"
