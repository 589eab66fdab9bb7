"""Keeps a snapshot in a file: read at the start, written from time to time and at the end.

A snapshot that cannot be read, or that is of no use, is a cold start and a line in the log, never an error. One that cannot be
written is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.cluster.snapshots.file import CLOCKS, Clocks, read, write
from gateway.cluster.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.config.listen import AUTO, OFF
from gateway.config.schema import Config
from gateway.state.lazy import state_folder
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.snapshots")

TOLD_S = 3600.0  # between two lines about the same reason
LAST_S = 5.0  # for the last one, at the end


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """every_s: seconds between two writes."""

    path: Path
    every_s: float


def file_of(config: Config) -> SnapshotFile | None:
    """The file that a configuration asks for."""
    file, every_s = config.snapshot.file, config.snapshot.every_s
    if file != AUTO:
        return SnapshotFile(Path(file), every_s) if file != OFF else None
    host, port = config.address
    name = "".join(char if char.isalnum() or char in ".-" else "-" for char in host)
    return SnapshotFile(state_folder() / f"index-{name}-{port}.snapshot", every_s) if port else None


class Keeper:
    """See the top of this file."""

    def __init__(
        self,
        file: SnapshotFile,
        collect: Callable[[], Awaitable[Snapshot | None]],
        metrics: Metrics,
        clocks: Clocks = CLOCKS,
    ) -> None:
        """collect: None: there is nothing to be kept. May raise KnowledgeError: there is none now."""
        self._path = file.path
        self._every_s = file.every_s
        self._collect = collect
        self._metrics = metrics
        self._clocks = clocks
        self._notices = Notices(clocks.monotonic, most=1, within_s=TOLD_S)
        self._writing: asyncio.Future[int] | None = None  # in its thread
        for result in ("good", "failed"):
            metrics.snapshots.add((result,), 0)

    async def read(self) -> Snapshot | None:
        """The last one, if there is one."""
        try:
            found = await asyncio.to_thread(read, self._path, self._clocks)
        except FileNotFoundError:
            log.info("no snapshot: the prefix index begins empty", extra={"path": str(self._path)})
        except (OSError, KnowledgeError) as error:
            self.ignore(error)
        else:
            self._show_age(found)
            return found
        return None

    def ignore(self, error: Exception) -> None:
        """What was read is of no use."""
        about = {"path": str(self._path), "reason": str(error)}
        log.warning("snapshot ignored: the prefix index begins empty", extra=about)

    async def run(self) -> None:
        """Write one every `every_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.write()

    async def write_last(self) -> None:
        """At the end: within LAST_S, or not at all."""
        try:
            async with asyncio.timeout(LAST_S):
                await self.write(logging.INFO)
        except TimeoutError:
            log.warning("no last snapshot: it took too long", extra={"path": str(self._path)})

    async def write(self, level: int = logging.DEBUG) -> None:
        """level: of the log line."""
        try:
            snapshot = await self._collect()
            if snapshot is None or snapshot.header.partial:  # the last one is worth more
                return
            if self._writing and not self._writing.done():  # whoever waited for it has given up
                await asyncio.wait([self._writing])
                self._writing.exception()  # nobody else asks for it
            self._writing = asyncio.ensure_future(asyncio.to_thread(write, self._path, snapshot, self._clocks))
            size = await asyncio.shield(self._writing)
        except (OSError, KnowledgeError) as error:
            self._metrics.snapshots.add(("failed",))
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            about = {"path": str(self._path), "reason": str(error)}
            self._notices.say(reason, log.warning, "snapshot not written", about)
            return
        self._metrics.snapshots.add(("good",))
        self._metrics.snapshot_bytes.set((), size)
        self._show_age(snapshot)
        log.log(level, "snapshot written", extra={"path": str(self._path), "bytes": size})

    def _show_age(self, snapshot: Snapshot) -> None:
        """Of what the next start would read."""
        self._metrics.snapshot_timestamp.set((), self._clocks.wall() - (self._clocks.monotonic() - snapshot.at))

    def __repr__(self) -> str:
        return f"<Keeper of {self._path}>"
