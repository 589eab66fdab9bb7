r"""As much load on each of several processes, which may share a port, and the CPU of each.

    python -m bench.gateway.even \
        '{"servers": [[8000, 123], [8000, 124]], "watched": [123, 124, 100], "connections": 16, "each": 500}'

Prints one JSON object. On a port that is shared, which process has which connection is the kernel's choice (SO_REUSEPORT) and
can be read in /proc: connections are made until each process has as many as it is to have, and each of them sends as many
requests. So no process does another's work when one is slower, and the costs of a request to its own process and to the others
can be separated. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.measure.cpu import cpu_seconds
from bench.measure.load import Connection, Tally
from bench.measure.mock import many_files
from bench.measure.prompts import Requests
from bench.measure.replies import WORDS

MOST = 64  # connections made for each that is wanted: the kernel deals them out by a hash


@dataclass(frozen=True, slots=True)
class Even:
    """servers: port and process. connections: to each. each, warm: requests on each of them. watched: who is timed."""

    servers: Sequence[tuple[int, int]]
    watched: Sequence[int]
    connections: int = 16
    each: int = 500
    warm: int = 20
    size: int = 2000
    chunks: int = 0
    patience: float = 60.0


class EvenLoop:
    """See `Even`."""

    def __init__(self, job: Even) -> None:
        self._job = job
        self._requests = Requests(job.size, job.chunks)
        self._left: Counter[Connection] = Counter()
        self._tally = Tally()
        self._all = asyncio.Event()
        self.connections: list[Connection] = []

    async def connect(self) -> None:
        """Raises RuntimeError if a process gets no connections."""
        requests, self._requests = self._requests, Requests(self._job.size, 0)
        for port, pid in self._job.servers:
            found: list[Connection] = []
            for _ in range(MOST * self._job.connections):
                connection = await self._connection(port)
                if owned(pid, port, connection.transport.get_extra_info("sockname")[1]):
                    found.append(connection)
                else:
                    connection.transport.abort()
                if len(found) == self._job.connections:
                    break
            else:
                raise RuntimeError(f"process {pid} accepts no connections on port {port}")
            self.connections += found
        self._requests = requests

    async def _connection(self, port: int) -> Connection:
        """One that was answered, so it is accepted."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self._next), "127.0.0.1", port)
        await self._run([connection], 1, Tally())
        return connection

    async def run(self, each: int) -> Tally:
        """So many requests on every connection."""
        tally = Tally(self._job.chunks or WORDS, bool(self._job.chunks))
        await self._run(self.connections, each, tally)
        return tally

    async def _run(self, connections: Sequence[Connection], each: int, tally: Tally) -> None:
        self._tally, self._left = tally, Counter(dict.fromkeys(connections, each))
        self._all.clear()
        for connection in connections:
            self._next(connection)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all.wait(), self._job.patience)
        tally.give_up()

    def _next(self, connection: Connection) -> None:
        if not connection.usable:
            self._tally.errors["closed"] += self._left.pop(connection, 0)
        elif self._left[connection]:
            self._left[connection] -= 1
            connection.send(next(self._requests), self._tally)
        if not self._tally.open and not self._left.total():
            self._all.set()


def owned(pid: int, port: int, client: int) -> bool:
    """Whether this process has the server's end of the connection between these ports of 127.0.0.1."""
    ends = f":{port:04X} 0100007F:{client:04X} "
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines():
        if ends in line:
            return f"socket:[{line.split()[9]}]" in _files(pid)
    return False


def _files(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


async def even_loop(job: Even) -> dict[str, object]:
    load = EvenLoop(job)
    await load.connect()
    await load.run(job.warm)
    before = [cpu_seconds(pid) for pid in job.watched]
    tally = await load.run(job.each)
    spent = [cpu_seconds(pid) - begun for pid, begun in zip(job.watched, before, strict=True)]
    for connection in load.connections:
        connection.transport.abort()
    return {"cpu_s": spent, **tally.summary()}


def command(job: Even) -> list[str]:
    """What runs it in a process of its own."""
    return [sys.executable, "-m", "bench.gateway.even", json.dumps(asdict(job))]


if __name__ == "__main__":
    many_files()
    print(json.dumps(uvloop.run(even_loop(Even(**json.loads(sys.argv[1]))))))
