"""One client's connection, as far as its requests are plain: the fast path past aiohttp's reader, its tasks and its requests.

    idle ── begin ──► its body comes ──► served ──► idle
                                            └─────► closed (the client left, or the answer is the last one)

One request at a time: what the client sends behind it (pipelined bytes) waits, charged to the budget, and beyond MAX_BEHIND the
connection is not read. Whatever `begin` does not take is aiohttp's (`connection.py`), untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from gateway.admission.memory import Account, Lease
from gateway.server.http.plain_request import Beginning, PlainRequest

MAX_BEHIND: Final = 1 << 16  # pipelined bytes; one read more may come before the connection is paused


class Connection(Protocol):
    """What the fast path needs of the connection that it is a part of."""

    local: bool

    @property
    def transport(self) -> asyncio.Transport | None: ...
    def served(self, behind: bytes, *, keep: bool) -> None: ...
    def hold(self, *, on: bool) -> None: ...
    async def linger(self) -> None: ...


class FastPath:
    """See the top of this file. request: the one that is on its way, if any is. account: the client's, once it is connected."""

    __slots__ = (
        "_behind",
        "_behind_lease",
        "_connection",
        "_deaf",
        "_handler",
        "_held",
        "_loop",
        "_task",
        "account",
        "request",
    )

    def __init__(
        self, connection: Connection, handler: Callable[[Any], Awaitable[Any]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """handler: answers a request; what it returns says whether the connection may be used again, as aiohttp's do."""
        self._connection: Connection | None = connection  # None: it is lost; they would refer to each other for ever
        self._handler = handler
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._behind = bytearray()  # in one piece: it may come byte by byte
        self._behind_lease: Lease | None = None
        self._held = False  # the connection is not read
        self._deaf = False  # the connection ends with this request: what still comes is dropped
        self.account: Account | None = None
        self.request: PlainRequest | None = None

    def begin(self, begun: Beginning, data: bytes) -> None:
        """Serve the request that `data` begins with."""
        connection = self._connection
        assert self.account is not None
        assert connection is not None
        end = begun.end + begun.length
        behind = b""
        if len(data) > end:
            data, behind = data[:end], data[end:]
        self.request = request = PlainRequest(data, begun, connection, self.account.lease())
        if behind:
            self._keep(behind)
        self._task = asyncio.Task(self._serve(request, connection), loop=self._loop, name="request")

    def feed(self, data: bytes) -> None:
        """More has come while a request is on its way."""
        assert self.request is not None
        if self._deaf:
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
        """Keep pipelined bytes until the request before them is answered."""
        assert self.account is not None
        if self._behind_lease is None:
            self._behind_lease = self.account.lease()
        if not self._behind_lease.grow(len(data)):
            self._go_deaf()  # the requests in it get no answer: the client sees the connection end, and may repeat them
            return
        self._behind += data
        if not self._held and len(self._behind) > MAX_BEHIND:
            self._held = True
            self._hold(on=True)

    def _go_deaf(self) -> None:
        self._deaf = True
        self._behind = bytearray()
        if self._behind_lease is not None:
            self._behind_lease.close()

    async def _serve(self, request: PlainRequest, connection: Connection) -> None:
        keep = False
        try:
            reply = await self._handler(request)
            await reply.write_eof()
            keep = reply.keep_alive and request.complete and not self._deaf and self._connection is not None
            if not request.complete:
                self._go_deaf()
                self._unhold()
                if request.lingers:
                    await connection.linger()
        except ConnectionError:
            """The client left."""
        finally:
            request.close()
            self.request = self._task = None
            behind = b""
            if self._behind_lease is not None:
                behind, self._behind = bytes(self._behind), bytearray()
                self._behind_lease.close()
                self._behind_lease = None
            self._unhold()
            connection.served(behind, keep=keep)

    def _unhold(self) -> None:
        if self._held:
            self._held = False
            self._hold(on=False)

    def _hold(self, *, on: bool) -> None:
        if self._connection:
            self._connection.hold(on=on)

    def __repr__(self) -> str:
        return f"<FastPath {self.request!r}, {len(self._behind)} bytes behind it>"
