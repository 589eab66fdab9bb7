"""Serves the side listeners (`side_sockets.py`): one server per name, on all of its sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from gateway.cluster.side_sockets import SideSockets
from gateway.server.endpoints import SHUTDOWN_S
from gateway.server.http.accept import Acceptor
from gateway.server.http.connections import ClientServer


@contextlib.asynccontextmanager
async def serving(sockets: SideSockets, runners: Callable[[str], ClientServer]) -> AsyncIterator[None]:
    """Serve within the context. runners: makes the server for "admin" or "metrics"."""
    async with contextlib.AsyncExitStack() as stack:
        started: dict[str, ClientServer] = {}
        for name, sock in sockets:
            if name not in started:
                started[name] = server = runners(name)
                stack.push_async_callback(server.shutdown, SHUTDOWN_S)
            stack.enter_context(contextlib.closing(Acceptor(sock, started[name], started[name].tls)))
        yield
