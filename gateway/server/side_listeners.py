"""Serving on the sockets beside the clients' ones (`side_sockets.py`): a site for each, on a runner for each application."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from gateway.cluster.side_sockets import SideSockets

# Since Python 3.13 the loop would remove the file of a Unix socket, which other workers still accept on.
_KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class SocketSite(web.BaseSite):
    """Accepts on a listening socket, of TCP or Unix."""

    def __init__(self, runner: web.BaseRunner, sock: socket.socket) -> None:
        super().__init__(runner)
        self._sock = sock

    @property
    def name(self) -> str:
        return str(self._sock.getsockname())

    async def start(self) -> None:
        await super().start()
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        if self._sock.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(server, sock=self._sock, **_KEEP_FILE)
        else:
            self._server = await loop.create_server(server, sock=self._sock)


@contextlib.asynccontextmanager
async def serving(sockets: SideSockets, runners: Callable[[str], web.BaseRunner]) -> AsyncIterator[None]:
    """Serve until the end. runners: makes the runner for "admin" or "metrics"."""
    async with contextlib.AsyncExitStack() as stack:
        started: dict[str, web.BaseRunner] = {}
        for name, sock in sockets:
            if name not in started:
                started[name] = runner = runners(name)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
            await SocketSite(started[name], sock).start()
        yield
