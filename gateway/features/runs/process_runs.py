"""The runs of one process, of any kind: work that belongs to the process and not to a connection.

    run: every TICK_S they are compared with the store, which decides; every RENEW_S they are alive there
    close: unfinished ones end

Runs of other processes are watched, for clients that wait for their ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import ClassVar, Final, Generic, Protocol, TypeVar
from uuid import uuid4

from gateway.database.failures import StoreFailed
from gateway.features.runs.event_log import Key, Logs
from gateway.features.runs.watching import WatchedRuns

log = logging.getLogger("warmroute.state")

TICK_S: Final = 1.0
RENEW_S: Final = 10.0
ALIVE_S: Final = 60.0  # lifetime of a stored run after a renewal; allows for a slow database and clock differences
CLOSE_S: Final = 5.0


class ProcessRun(Protocol):
    """A run of this process."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Serves its request; None: before its start."""


R = TypeVar("R", bound=ProcessRun)


class ProcessRuns(Generic[R]):
    """runner: the id of the process in the store. logs: of their events. watched: runs of other processes. unsynchronized: the
    warning while the store does not answer.
    """

    unsynchronized: ClassVar[str]

    def __init__(self, logs: Logs, timer: Callable[[], float]) -> None:
        """timer: monotonic seconds."""
        self.runner = uuid4().hex
        self.logs = logs
        self.watched = WatchedRuns()
        self._timer = timer
        self._runs: dict[Key, R] = {}
        self._active = asyncio.Event()  # `run` has work
        self._renewed = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    async def wait_for_end(self, key: Key, client: str) -> None:
        """Waits until a run of another process has ended. client: the address of the follower. Raises GatewayError 429."""
        self._active.set()
        await self.watched.wait_for_end(key, client)

    # -- periodic work

    async def run(self) -> None:
        """Compares the runs with the store, until cancelled."""
        while True:
            await self._active.wait()
            await asyncio.sleep(TICK_S)
            try:
                await self._synchronize()
            except StoreFailed as failure:
                log.warning(self.unsynchronized, extra={"reason": str(failure)})
            self.logs.expire(self._timer())
            if not (self._runs or len(self.watched) or self._holds_ended()):
                self._active.clear()

    async def _synchronize(self) -> None:
        """Stops runs that have ended in the store, and ends waits for ended runs of other processes. Raises StoreFailed."""
        raise NotImplementedError

    def _holds_ended(self) -> bool:
        """Drops expired parts of ended runs. True if some are still held."""
        raise NotImplementedError

    async def _renew(self, renew: Callable[[], Awaitable[None]]) -> None:
        """Calls it if the runs have not been renewed for RENEW_S. Raises StoreFailed."""
        if self._timer() - self._renewed >= RENEW_S:
            await renew()
            self._renewed = self._timer()

    async def _end_all(self, stop: Callable[[R], None], others: Iterable[asyncio.Task[None]] = ()) -> None:
        """Stops all runs, and waits for their tasks and others. Tasks that last longer than CLOSE_S are cancelled."""
        tasks = [*others, *(run.task for run in self._runs.values() if run.task is not None)]
        for run in tuple(self._runs.values()):
            stop(run)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._runs)} running, {len(self.watched)} watched, {self.logs!r}>"
