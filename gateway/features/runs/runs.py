"""The runs of this process: responses that are made without a client connection.

    start ──► beginning.py: stored as queued, durably ──► a task: the lifecycle of any request ──► recording.py: stores the end,
                  │                                     ▲                                            then ends its log
                  └──► the client is answered           └── stop: cancelled or deleted, here or elsewhere (within TICK_S)

While the store does not answer, an end waits in its task, and the run still counts. Bounds: MAX_RUNS per process, MAX_OWNED per
owner, a share per address (`places.py`).

A shutdown waits for runs as for requests; unfinished runs then fail. A killed process cannot report: its runs fail when they
have not been renewed for `process_runs.ALIVE_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gateway.dialects.api_request import ApiRequest
from gateway.errors import shutting_down
from gateway.features.runs.beginning import NewRun, RunStarter
from gateway.features.runs.event_log import Logs
from gateway.features.runs.places import RunPlaces
from gateway.features.runs.process_runs import ProcessRuns
from gateway.features.runs.recording import RunRecorder
from gateway.features.runs.run import Run
from gateway.features.runs.run_format import RunFormat
from gateway.features.runs.run_request import RunRequest
from gateway.request.client import Caller, ClientReply, ClientRequest, InternalRequest
from gateway.request.running import RunningRequests
from gateway.telemetry.counters import Counter

if TYPE_CHECKING:
    from gateway.features.runs.run import OpenStore

Serve = Callable[[InternalRequest, ApiRequest, Caller], Awaitable[ClientReply]]
"""`Lifecycle.run`."""


class Runs(ProcessRuns[Run]):
    """The runs of one process. open_store: opens the store. ended: counter by status. clock: Unix seconds. timer: monotonic
    seconds.
    """

    unsynchronized = "background runs cannot be compared with the store"

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
        super().__init__(logs or Logs(), timer)
        self.format = format_
        self.open_store = open_store
        self._running = running
        self._starter = RunStarter(format_, open_store, self.logs, self.runner, clock)
        self._recorder = RunRecorder(open_store, running, ended, timer)

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

    async def _synchronize(self) -> None:
        mine, theirs = list(self._runs.values()), self.watched.keys()
        if not (mine or theirs):
            return
        store = await self.open_store()
        running = await store.running_of(self.runner, theirs)
        for run in mine:
            if run.key not in running and not run.storing:
                self.stop(*run.key)
        self.watched.end_missing(running, theirs)
        if mine:
            await self._renew(lambda: store.renew(self.runner, [run.id for run in mine]))

    def _holds_ended(self) -> bool:
        return len(self.logs) > 0

    async def close(self) -> None:
        """Unfinished runs fail. Idempotent."""
        self._recorder.closing = True
        await self._end_all(lambda run: run.stop("the gateway shuts down"), self._starter.withdrawals)
