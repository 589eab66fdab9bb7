"""What a request is given that comes through aiohttp alone: its memory lease, and a reply that aiohttp writes."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDictProxy

from gateway.admission.memory import Budget, MemoryLease, client_of
from gateway.config.addresses import is_local
from gateway.server.bounds import HEAD_COPIES
from gateway.server.fallback.reply import QueuedReply
from gateway.server.http.aiohttp_request import AiohttpRequest
from gateway.server.http.body import read_body


class Held:
    """Beside one of aiohttp's requests, under HELD. local: the other end is on this machine. Closed with the request.

    lease: charged with the head now, and with the body's bytes as they are taken from aiohttp (`Body`), which holds at most its
    own bound of them before.
    """

    def __init__(self, request: web.Request, budget: Budget) -> None:
        peer = request.transport.get_extra_info("peername") if request.transport else None
        self.request = request
        self.local = request.transport is not None and is_local(peer)
        self.lease: MemoryLease = budget.lease(client_of(peer))
        self.lease.head = HEAD_COPIES * sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
        self.lease.grow(self.lease.head)
        self._replies: list[QueuedReply] = []

    def reply(self, *, keep_alive: bool, patience_s: float) -> QueuedReply:
        made = QueuedReply(self.request, keep_alive=keep_alive, patience_s=patience_s)
        self._replies.append(made)
        return made

    def close(self) -> None:
        """Idempotent."""
        for reply in self._replies:
            reply.close()
        self.lease.close()


HELD: Final = web.RequestKey("held", Held)


class Body:
    """A request's body, of which each piece is charged when it is taken. What `http/body.py` needs of a request."""

    def __init__(self, held: Held) -> None:
        request = held.request
        self.headers: CIMultiDictProxy[str] = request.headers
        self.content_length = request.content_length
        self._content: Any = request.content
        self._lease = held.lease

    @property
    def content(self) -> Body:
        return self

    async def readany(self) -> bytes:
        """b"" at the end, and when the budget refuses the piece: the lease says so (`refused`)."""
        data: bytes = await self._content.readany()
        return data if self._lease.grow(len(data)) else b""


class PublicRequest(AiohttpRequest):
    """A request that came through aiohttp alone."""

    def __init__(self, held: Held) -> None:
        super().__init__(held.request, held.lease)
        self._held = held

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        source: Any = Body(self._held)
        return await read_body(source, self.lease, max_bytes=max_bytes, within_s=within_s, opaque=opaque)

    def reply(self, *, keep_alive: bool, patience_s: float) -> QueuedReply:
        return self._held.reply(keep_alive=keep_alive and self.inner.keep_alive, patience_s=patience_s)

    @property
    def local(self) -> bool:
        return self._held.local


def adapt(request: web.Request) -> AiohttpRequest:
    """One of aiohttp's requests as the lifecycle takes it, whichever server it came through."""
    held = request.get(HELD)
    return PublicRequest(held) if held else AiohttpRequest(request)
