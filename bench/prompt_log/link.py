"""A slow link in user space: a TCP proxy with a rate and a delay in each direction."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE = 16 << 10  # bytes; as much is on its way to the link, so that senders wait for it


@dataclass(slots=True)
class SlowLink:
    """bits_s: of each direction. delay_s: one way. up, down: bytes so far. busy_s: seconds for which the way up was in use."""

    host: str
    port: int
    bits_s: float
    delay_s: float
    url: str = ""
    up: int = 0
    down: int = 0
    busy_s: float = 0.0
    _free_up: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[SlowLink]:
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_PIECE)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port, limit=_PIECE)
        except OSError:
            writer.close()
            return
        for source, sink, up in ((reader, far_writer, True), (far_reader, writer, False)):
            task = asyncio.create_task(self._carry(source, sink, up=up))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, up: bool) -> None:
        loop, free = asyncio.get_running_loop(), 0.0
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_PIECE):
                took = len(data) * 8 / self.bits_s
                begin = max(loop.time(), self._free_up if up else free)
                free = begin + took
                if up:
                    self.up, self.busy_s, self._free_up = self.up + len(data), self.busy_s + took, free
                else:
                    self.down += len(data)
                await asyncio.sleep(free - loop.time())  # the link is in use; the next bytes wait
                loop.call_later(self.delay_s, _write, sink, data)
        loop.call_later(self.delay_s, sink.close)


def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
    if not sink.is_closing():
        sink.write(data)
