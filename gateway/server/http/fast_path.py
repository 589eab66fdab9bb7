"""The fast path of a client's connection: plain requests bypass aiohttp's parser, tasks and request objects.

    idle ── begin ──► receiving the body ──► served ──► idle
                                                └─────► closed (the client left, or the answer is the last one)

One request at a time: pipelined bytes are buffered, charged to the budget, and beyond MAX_PIPELINED reading is paused. Only
plain POSTs to FAST_PATHS come here; all other requests go to aiohttp (`connection.py`), untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from gateway.admission.memory import Account, MemoryLease
from gateway.server.http.plain_request import PlainConnection, PlainRequest, RequestStart

MAX_PIPELINED: Final = 1 << 16  # pipelined bytes; one read more may come before the connection is paused


class FastConnection(PlainConnection, Protocol):
    """What the fast path needs of its connection."""

    def served(self, pipelined: bytes, *, keep: bool) -> None: ...
    def hold(self, *, on: bool) -> None: ...
    async def linger(self) -> None: ...


class FastPath:
    """See the top of this file. request: the current one, None if idle. account: the client's, once it is connected."""

    __slots__ = (
        "_connection",
        "_handler",
        "_held",
        "_input_dropped",
        "_loop",
        "_pipelined",
        "_pipelined_lease",
        "_task",
        "account",
        "request",
    )

    def __init__(
        self, connection: FastConnection, handler: Callable[[Any], Awaitable[Any]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """handler: answers a request; its result has `keep_alive` and `write_eof`, as aiohttp's responses."""
        self._connection: FastConnection | None = connection  # None once it is lost: breaks a cycle
        self._handler = handler
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._pipelined = bytearray()  # pipelined bytes; in one piece, because they may arrive byte by byte
        self._pipelined_lease: MemoryLease | None = None
        self._held = False  # reading is paused
        self._input_dropped = False  # the connection ends with this request: further input is dropped
        self.account: Account | None = None
        self.request: PlainRequest | None = None

    def begin(self, begun: RequestStart, data: bytes) -> None:
        """Serve the request at the start of `data`."""
        connection = self._connection
        assert self.account is not None
        assert connection is not None
        end = begun.end + begun.length
        pipelined = b""
        if len(data) > end:
            data, pipelined = data[:end], data[end:]
        self.request = request = PlainRequest(data, begun, connection, self.account.lease())
        if pipelined:
            self._keep(pipelined)
        self._task = asyncio.Task(self._serve(request, connection), loop=self._loop, name="request")

    def feed(self, data: bytes) -> None:
        """Input during a request: its body, or pipelined bytes."""
        assert self.request is not None
        if self._input_dropped:
            return
        if not self.request.complete:
            data = self.request.feed(data)
        if data:
            self._keep(data)

    def lost(self) -> None:
        """The client left."""
        self._connection = None
        if self._task:
            self._task.cancel()

    def _keep(self, data: bytes) -> None:
        """Buffer pipelined bytes until the current request is answered."""
        assert self.account is not None
        if self._pipelined_lease is None:
            self._pipelined_lease = self.account.lease()
        if not self._pipelined_lease.grow(len(data)):
            self._drop_input()  # the requests in it are not answered: the connection ends, and the client may repeat them
            return
        self._pipelined += data
        if not self._held and len(self._pipelined) > MAX_PIPELINED:
            self._held = True
            self._hold(on=True)

    def _drop_input(self) -> None:
        self._input_dropped = True
        self._pipelined = bytearray()
        if self._pipelined_lease is not None:
            self._pipelined_lease.close()

    async def _serve(self, request: PlainRequest, connection: FastConnection) -> None:
        keep = False
        try:
            reply = await self._handler(request)
            await reply.write_eof()
            keep = reply.keep_alive and request.complete and not self._input_dropped and self._connection is not None
            if not request.complete:
                self._drop_input()
                self._unhold()
                if request.lingers:
                    await connection.linger()
        except ConnectionError:
            pass  # the client left
        finally:
            request.close()
            self.request = self._task = None
            pipelined = b""
            if self._pipelined_lease is not None:
                pipelined, self._pipelined = bytes(self._pipelined), bytearray()
                self._pipelined_lease.close()
                self._pipelined_lease = None
            self._unhold()
            connection.served(pipelined, keep=keep)

    def _unhold(self) -> None:
        if self._held:
            self._held = False
            self._hold(on=False)

    def _hold(self, *, on: bool) -> None:
        if self._connection:
            self._connection.hold(on=on)

    def __repr__(self) -> str:
        return f"<FastPath {self.request!r}, {len(self._pipelined)} pipelined bytes>"
