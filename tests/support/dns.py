"""A real name server, unbound, with the records of a test."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from bench.measure.ports import free_port
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
  local-zone: "test." {zone}
{records}
remote-control:
  control-enable: no
"""
_FORWARDING = """  module-config: "iterator"
  qname-minimisation: no
stub-zone:
  name: "{zone}"
  stub-addr: 127.0.0.1@{port}"""


TRIES, PAUSE_S = 50, 0.2


class NameServer:
    """Restarted on the same port for each set of records; or forwards to another server, and caches answers for their TTL."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._folder = folder
        self._config = folder / "unbound.conf"
        self._process: asyncio.subprocess.Process | None = None

    async def serve(self, *records: str) -> None:
        """Serves only these records below test."""
        await self._serve("static", "\n".join(f'  local-data: "{record}"' for record in records))

    async def forward(self, zone: str, port: int) -> None:
        """Forwards names of the zone to the server at this port of 127.0.0.1."""
        await self._serve("nodefault", _FORWARDING.format(zone=zone, port=port))

    async def _serve(self, zone: str, lines: str) -> None:
        self._config.write_text(_CONFIG.format(port=self.port, folder=self._folder, zone=zone, records=lines))
        await self.again()

    async def again(self) -> None:
        """Restarts with the same records."""
        await self.stop()
        for _ in range(TRIES):  # its port may be that of another test's connection for a while
            if await self._begins():
                return
            await self.stop()
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unbound has ended")

    def send(self, number: signal.Signals) -> None:
        assert self._process
        self._process.send_signal(number)

    async def _begins(self) -> bool:
        self._process = await asyncio.create_subprocess_exec(
            tool("unbound"), "-d", "-c", str(self._config), stderr=asyncio.subprocess.PIPE
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


def _free_port() -> int:
    """A port that is free for TCP and UDP."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
            udp.bind(("127.0.0.1", port := free_port()))
            return port


@contextlib.asynccontextmanager
async def name_server(folder: Path) -> AsyncIterator[NameServer]:
    server = NameServer(folder, _free_port())
    try:
        yield server
    finally:
        await server.stop()
