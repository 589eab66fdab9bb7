"""Parts of a gateway by themselves: a configuration in force, the clients' server around one handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.admission.connection_limit import ConnectionLimit
from gateway.admission.memory import Budget
from gateway.config.live import Live
from gateway.errors import too_many_connections
from gateway.server.http.connections import ClientServer
from tests.support.configs import load


def live_of(**config: Any) -> Live:
    """A configuration in force, with one pool by default."""
    return Live(load(None, {"pools": [{"replicas": ["http://127.0.0.1:1"]}], **config}, env={}))


Handler = Callable[[Any], Awaitable[Any]]  # of an HttpRequest


@asynccontextmanager
async def serving(handler: Handler, *, idle_s: float = 75.0, connections: int = 9) -> AsyncIterator[tuple[ClientServer, int]]:
    """The server and its port. All paths lead to the handler."""
    live = live_of(limits={"client_idle_s": idle_s, "body_mb": 1})
    bounds: dict[str, Any] = {"budget": Budget(1 << 28), "connection_limit": ConnectionLimit(connections)}
    clients = ClientServer(handler, handler, live=live, refusal=lambda: too_many_connections(connections), **bounds)
    server = await asyncio.get_running_loop().create_server(clients, "127.0.0.1", 0)
    try:
        yield clients, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await clients.shutdown(0.1)
