"""The runs of this process: responses that are made without a client connection.

    start ──► beginning.py: stored as queued, durably ──► a task: the lifecycle of any request ──► recording.py: stores the end,
                  │                                     ▲                                            then ends its log
                  └──► the client is answered           └── stop: cancelled or deleted, here or elsewhere (within TICK_S)

While the store does not answer, an end waits in its task, and the run still counts. Bounds: MAX_RUNS per process, MAX_OWNED per
owner, a share per address (`places.py`).

A shutdown waits for runs as for requests; unfinished runs then fail. A killed process cannot report: its runs fail when they
have not been renewed for `stored_runs.ALIVE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from gateway.database.failures import StoreFailed
from gateway.dialects.api_request import ApiRequest
from gateway.errors import shutting_down
from gateway.features.runs.beginning import NewRun, RunStarter
from gateway.features.runs.event_log import Key, Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.recording import RunRecorder
from gateway.features.runs.run import Run
from gateway.features.runs.run_format import RunFormat
from gateway.features.runs.run_request import RunRequest
from gateway.features.runs.watching import WatchedRuns
from gateway.request.client import Caller, ClientReply, ClientRequest, InternalRequest
from gateway.request.running import RunningRequests
from gateway.telemetry.counters import Counter

if TYPE_CHECKING:
    from gateway.features.runs.run import OpenStore

log = logging.getLogger("warmroute.state")

TICK_S: Final = 1.0
RENEW_S: Final = 10.0
CLOSE_S: Final = 5.0

Serve = Callable[[InternalRequest, ApiRequest, Caller], Awaitable[ClientReply]]
"""`Lifecycle.run`."""


class Runs:
    """The runs of one process. open_store: opens the store. watched: runs of other processes. ended: counter by status. clock:
    Unix seconds. timer: monotonic seconds.
    """

    def __init__(
        self,
        format_: RunFormat,
        open_store: OpenStore,
        running: RunningRequests,
        ended: Counter,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        logs: Logs | None = None,
    ) -> None:
        self.runner = uuid4().hex
        self.logs = logs or Logs()
        self.watched = WatchedRuns()
        self.format = format_
        self.open_store = open_store
        self._running = running
        self._timer = timer
        self._starter = RunStarter(format_, open_store, self.logs, self.runner, clock)
        self._recorder = RunRecorder(open_store, running, ended, timer)
        self._runs: dict[Key, Run] = {}
        self._active = asyncio.Event()  # there are runs, watched runs or logs
        self._renewed = 0.0

    @property
    def places(self) -> RunPlaces:
        """The places of runs, from start to end."""
        return self._starter.places

    # -- for requests

    async def start(self, origin: ClientRequest, caller: Caller, new: NewRun, serve: Serve) -> Run:
        """Stores and starts a run. origin: the request that asks for it. Raises GatewayError."""
        if self._running.draining or self._recorder.closing:
            raise shutting_down()
        request = await self._starter.begin(origin, new)
        run = request.run
        self._runs[run.key] = run
        self._active.set()
        run.task = asyncio.get_running_loop().create_task(self._run(run, request, caller, serve), name="background run")
        return run

    def stop(self, owner: str, id_: str) -> None:
        """Stops a run that was cancelled or deleted in the store."""
        if run := self._runs.get((owner, id_)):
            run.stopped = True
            run.stop("cancelled by its client")

    async def wait_for_end(self, key: Key, client: str) -> None:
        """Waits until a run of another process has ended. client: the address of the follower. Raises GatewayError 429."""
        self._active.set()
        await self.watched.wait_for_end(key, client)

    def __len__(self) -> int:
        return len(self._runs)

    async def _run(self, run: Run, request: RunRequest, caller: Caller, serve: Serve) -> None:
        progress = asyncio.get_running_loop().create_task(self._recorder.progress(run))
        try:
            run.started = True
            if not (run.stopped or self._recorder.closing):
                await serve(request, request.parsed(), caller)
                await run.store_plain_answer()
        except (asyncio.CancelledError, ConnectionError):
            if not (run.stopped or self._recorder.interrupted):
                raise
        finally:
            run.settling = True
            progress.cancel()
            request.close()
            try:
                await self._recorder.settle(run)
            finally:
                del self._runs[run.key]
                self.places.release(run.key[0], run.client)
                self.logs.end(run.key, self._timer())

    # -- periodic work

    async def run(self) -> None:
        """Stops runs that another process has ended, and renews the own ones, until cancelled."""
        while True:
            await self._active.wait()
            await asyncio.sleep(TICK_S)
            try:
                await self._synchronize()
            except StoreFailed as failure:
                log.warning("background runs cannot be compared with the store", extra={"reason": str(failure)})
            self.logs.expire(self._timer())
            if not (self._runs or len(self.watched) or len(self.logs)):
                self._active.clear()

    async def _synchronize(self) -> None:
        """Compares the runs with the store. Raises StoreFailed."""
        mine, theirs = list(self._runs.values()), self.watched.keys()
        if not (mine or theirs):
            return
        store = await self.open_store()
        running = await store.running_of(self.runner, theirs)
        for run in mine:
            if run.key not in running and not run.storing:
                self.stop(*run.key)
        self.watched.end_missing(running, theirs)
        if mine and self._timer() - self._renewed >= RENEW_S:
            await store.renew(self.runner, [run.id for run in mine])
            self._renewed = self._timer()

    async def close(self) -> None:
        """Unfinished runs fail. Idempotent."""
        self._recorder.closing = True
        tasks = [*self._starter.withdrawals, *(run.task for run in self._runs.values() if run.task)]
        for run in tuple(self._runs.values()):
            run.stop("the gateway shuts down")
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Runs {len(self._runs)} running, {len(self.watched)} watched, {self.logs!r}>"
