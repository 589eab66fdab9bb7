"""What lies between a client and a server: connections can be cut, refused, or go silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.cluster.listeners import open_listeners
from gateway.server.http.accept import Acceptor


class Cable:
    """Passes bytes on to a port of 127.0.0.1, from its own `port`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._acceptor: Acceptor | None = None
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks = set[asyncio.Task[None]]()

    def _listen(self) -> None:
        (listener,) = open_listeners("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve))

    async def _unplug(self) -> None:
        if self._acceptor:
            self._acceptor.close()
            await self._acceptor.wait_closed()
            await asyncio.sleep(0)  # the tasks of connections that were accepted last begin
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def plugged(self) -> AsyncIterator[Cable]:
        self._listen()
        try:
            yield self
        finally:
            await self._unplug()

    def cut(self) -> None:
        """All connections are reset."""
        for task in list(self._tasks):
            task.cancel()

    @contextlib.asynccontextmanager
    async def refusing(self) -> AsyncIterator[None]:
        await self._unplug()
        try:
            yield
        finally:
            self._listen()

    @contextlib.asynccontextmanager
    async def silent(self) -> AsyncIterator[None]:
        """Nothing arrives, until all of it does."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        ends = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._passes.wait()
                inner, outer = await asyncio.open_connection("127.0.0.1", self._target)
                ends.append(outer)
                ways = [asyncio.ensure_future(self._pass_on(*way)) for way in ((reader, outer), (inner, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._tasks.discard(task)
            for end in ends:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
