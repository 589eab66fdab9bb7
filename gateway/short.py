"""One client's connection, as far as its requests are plain: the short way past aiohttp's reader, its tasks and its requests.

    idle ── begin ──► its body comes ──► served ──► idle
                                            └─────► closed (the client left, or the answer is the last one)

One request at a time: what the client sends behind it waits, and beyond MAX_BEHIND bytes the connection is not read. Whatever
`begin` does not take is aiohttp's (`front.py`), untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from gateway.plain import Beginning, PlainRequest

if TYPE_CHECKING:
    from gateway.front import ClientConnection

MAX_BEHIND: Final = 1 << 16


class ShortWay:
    """See the top of this file. request: the one that is on its way, if any is."""

    __slots__ = ("_behind", "_connection", "_handler", "_held", "_loop", "_task", "request")

    def __init__(
        self, connection: ClientConnection, handler: Callable[[Any], Awaitable[Any]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """handler: answers a request; what it returns says whether the connection may be used again, as aiohttp's do."""
        self._connection = connection
        self._handler = handler
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._behind = bytearray()  # in one piece: it may come byte by byte
        self._held = False  # the connection is not read
        self.request: PlainRequest | None = None

    def begin(self, begun: Beginning, data: bytes) -> None:
        """Serve the request that `data` begins with."""
        end = begun.end + begun.length
        if len(data) > end:
            self._behind += data[end:]
            data = data[:end]
        self.request = request = PlainRequest(data, begun, self._connection)
        self._task = asyncio.Task(self._serve(request), loop=self._loop, name="request")

    def feed(self, data: bytes) -> None:
        """More has come while a request is on its way."""
        assert self.request is not None
        if self.request.body is None:
            data = self.request.feed(data)
        if data:
            self._behind += data
        if not self._held and len(self._behind) > MAX_BEHIND:
            self._held = True
            self._connection.hold(on=True)

    def lost(self) -> None:
        """The client left."""
        if self._task:
            self._task.cancel()

    async def _serve(self, request: PlainRequest) -> None:
        keep = False
        try:
            reply = await self._handler(request)
            await reply.write_eof()
            keep = reply.keep_alive and request.body is not None
        except ConnectionError:
            """The client left."""
        finally:
            self.request = self._task = None
            behind, self._behind = self._behind, bytearray()
            if self._held:
                self._held = False
                self._connection.hold(on=False)
            self._connection.served(bytes(behind), keep=keep)

    def __repr__(self) -> str:
        return f"<ShortWay {self.request!r}, {len(self._behind)} bytes behind it>"
