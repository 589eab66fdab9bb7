"""Serves the side listeners (`side_sockets.py`): one runner per application, on all of its sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from gateway.cluster.side_sockets import SideSockets
from gateway.server.endpoints import AnyRunner
from gateway.server.http.accept import Acceptor


@contextlib.asynccontextmanager
async def serving(sockets: SideSockets, runners: Callable[[str], AnyRunner]) -> AsyncIterator[None]:
    """Serve within the context. runners: makes the runner for "admin" or "metrics"."""
    async with contextlib.AsyncExitStack() as stack:
        started: dict[str, AnyRunner] = {}
        for name, sock in sockets:
            if name not in started:
                started[name] = runner = runners(name)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
            stack.enter_context(contextlib.closing(Acceptor(sock, started[name].protocols)))
        yield
