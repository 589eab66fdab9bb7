"""A real name server, unbound, that serves what a test gives it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.tools import tool

_CONFIG = """
server:
  interface: 127.0.0.1@{port}
  do-daemonize: no
  chroot: ""
  directory: "{folder}"
  username: ""
  pidfile: ""
  use-syslog: no
  do-not-query-localhost: no
  access-control: 127.0.0.0/8 allow
  local-zone: "test." static
{records}
remote-control:
  control-enable: no
"""


TRIES, PAUSE_S = 50, 0.2


class NameServer:
    """Begun anew with each set of records, at the same port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def serve(self, *records: str) -> None:
        """These, and nothing else below test."""
        await self.stop()
        lines = "\n".join(f'  local-data: "{record}"' for record in records)
        config = self._folder / "unbound.conf"
        config.write_text(_CONFIG.format(port=self.port, folder=self._folder, records=lines))
        for _ in range(TRIES):  # its port may be that of another test's connection for a while
            if await self._begins(config):
                return
            await self.stop()
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unbound has ended")

    async def _begins(self, config: Path) -> bool:
        self._process = await asyncio.create_subprocess_exec(
            tool("unbound"), "-d", "-c", str(config), stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr
        while b"start of service" not in (line := await self._process.stderr.readline()):
            if not line:
                return False
        return True

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                process.terminate()
            await process.communicate()


@contextlib.asynccontextmanager
async def name_server(folder: Path) -> AsyncIterator[NameServer]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = NameServer(folder, port)
    try:
        yield server
    finally:
        await server.stop()
