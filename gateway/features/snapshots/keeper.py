"""Keeps a snapshot in a file: read at the start, written periodically and at the end.

An unreadable or useless snapshot leads to a cold start and a log line, never to an error. A failed write is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.config.listen import AUTO, OFF
from gateway.config.schema import Config
from gateway.database.places import state_folder
from gateway.features.snapshots.file import read, write
from gateway.features.snapshots.frames import CLOCKS, Clocks
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.section import SNAPSHOT
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.snapshots")

REPEATED_LOG_S = 3600.0  # between two log lines with the same reason
EVERY_S = 60.0  # a restart loses at most a minute of prompts
LAST_S = 5.0  # time limit of the last snapshot, at the end

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """The file of snapshots. every_s: seconds between two writes."""

    path: Path
    every_s: float = EVERY_S


def file_of(config: Config) -> SnapshotFile | None:
    """The configured file of snapshots, or None."""
    file = SNAPSHOT.of(config).file
    if file != AUTO:
        return SnapshotFile(Path(file)) if file != OFF else None
    host, port = config.address
    name = "".join(char if char.isalnum() or char in ".-" else "-" for char in host)
    return SnapshotFile(state_folder() / f"index-{name}-{port}.snapshot") if port else None


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs work in a daemon thread, so that a hanging disk does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(set_it: Callable[[], None]) -> None:
        if not result.done():
            set_it()

    def run() -> None:
        try:
            set_it = partial(result.set_result, work())
        except BaseException as error:  # noqa: BLE001  (the caller gets it)
            set_it = partial(result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # if the loop is closed
            loop.call_soon_threadsafe(end, set_it)

    try:
        threading.Thread(target=run, name="snapshot", daemon=True).start()
    except RuntimeError as error:  # the process has reached its limit of threads
        result.set_exception(OSError(errno.ENOMEM, str(error)))
    return result


class Keeper:
    """Reads and writes the file."""

    def __init__(
        self,
        file: SnapshotFile,
        collect: Callable[[], Awaitable[Snapshot | None]],
        metrics: SnapshotMetrics,
        clocks: Clocks = CLOCKS,
        last_s: float = LAST_S,
    ) -> None:
        """collect: None: no prefixes are known. May raise KnowledgeError. last_s: time limit of the last snapshot."""
        self._path = file.path
        self._every_s = file.every_s
        self._collect = collect
        self._metrics = metrics
        self._clocks = clocks
        self._last_s = last_s
        self._notices = Notices(clocks.monotonic, most=1, within_s=REPEATED_LOG_S)
        self._writing: asyncio.Future[int] | None = None  # a write in a thread
        for result in ("good", "failed"):
            metrics.written.add((result,), 0)

    async def read(self) -> Snapshot | None:
        """The last snapshot, or None."""
        try:
            found = await asyncio.to_thread(read, self._path, self._clocks)
        except FileNotFoundError:
            log.info("there is no snapshot", extra={"path": str(self._path)})
        except (OSError, KnowledgeError) as error:
            log.warning("snapshot ignored", extra={"path": str(self._path), "reason": str(error)})
        else:
            self._show_age(found)
            return found
        return None

    async def run(self) -> None:
        """Writes a snapshot every `every_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.write()

    async def write_last(self) -> None:
        """Writes the last snapshot. Waits at most last_s: the process may end before it is written."""
        try:
            async with asyncio.timeout(self._last_s):
                await self.write(logging.INFO)
        except TimeoutError:
            log.warning("last snapshot not written in time", extra={"path": str(self._path), "seconds": self._last_s})

    async def write(self, level: int = logging.DEBUG) -> None:
        """Writes a snapshot. level: of the log line."""
        try:
            snapshot = await self._collect()
            if snapshot is None:
                return
            if snapshot.header.partial:
                about = {"path": str(self._path), "reason": "the first snapshot is not completely restored"}
                log.log(level, "snapshot file left unchanged", extra=about)
                return
            if self._writing and not self._writing.done():  # its caller has timed out
                await asyncio.wait([self._writing])
                self._writing.exception()  # marks the exception as retrieved
            self._writing = in_thread(partial(write, self._path, snapshot, self._clocks))
            size = await asyncio.shield(self._writing)
        except (OSError, KnowledgeError) as error:
            self._metrics.written.add(("failed",))
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            about = {"path": str(self._path), "reason": str(error)}
            self._notices.say(reason, log.warning, "snapshot not written", about)
            return
        except Exception:  # a bug: the caller logs it
            self._metrics.written.add(("failed",))
            raise
        self._metrics.written.add(("good",))
        self._metrics.bytes.set((), size)
        self._show_age(snapshot)
        log.log(level, "snapshot written", extra={"path": str(self._path), "bytes": size})

    def _show_age(self, snapshot: Snapshot) -> None:
        """Sets the metric of the age of the snapshot in the file."""
        self._metrics.timestamp.set((), self._clocks.wall() - (self._clocks.monotonic() - snapshot.at))

    def __repr__(self) -> str:
        return f"<Keeper of {self._path}>"
