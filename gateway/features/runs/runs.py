"""The runs of this process: responses that are made without a client connection.

    start ──► beginning.py: kept as queued, durably ──► a task: the ordinary lifecycle, as any request ──► recording.py: how it
                  │                                     ▲                                   has ended is kept, its log ends, too
                  └──► the client is answered           └── stop: cancelled or deleted, here or (seen within TICK_S) elsewhere

While the store does not answer, an end waits in its task, and the run still counts. Bounds: MAX_RUNS of a process, MAX_OWNED of
an owner, a share of an address (`places.py`).

A shutdown waits for runs as for requests; what has not ended then fails. A process that is killed says nothing: its runs fail
when it has been silent for `stored_runs.ALIVE_S`.
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
    from gateway.features.runs.run import Opened

log = logging.getLogger("warmroute.state")

TICK_S: Final = 1.0
RENEW_S: Final = 10.0
CLOSE_S: Final = 5.0

Serve = Callable[[InternalRequest, ApiRequest, Caller], Awaitable[ClientReply]]
"""`Lifecycle.run`."""


class Runs:
    """See the top of this file. opened: opens the store. watched: runs of other processes. ended: counter by status. clock:
    Unix seconds. timer: monotonic seconds.
    """

    def __init__(
        self,
        format_: RunFormat,
        opened: Opened,
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
        self.opened = opened
        self._running = running
        self._timer = timer
        self._beginnings = RunStarter(format_, opened, self.logs, self.runner, clock)
        self._recording = RunRecorder(opened, running, ended, timer)
        self._runs: dict[Key, Run] = {}
        self._some = asyncio.Event()  # there is something to look after
        self._renewed = 0.0

    @property
    def places(self) -> RunPlaces:
        """That runs have, from their beginning to their end."""
        return self._beginnings.places

    # -- for requests

    async def start(self, asked: ClientRequest, caller: Caller, new: NewRun, serve: Serve) -> Run:
        """A new run, which is stored. asked: the request that asks for it. Raises GatewayError."""
        if self._running.draining or self._recording.closing:
            raise shutting_down()
        request = await self._beginnings.begin(asked, new)
        run = request.run
        self._runs[run.key] = run
        self._some.set()
        run.task = asyncio.get_running_loop().create_task(self._run(run, request, caller, serve), name="background run")
        return run

    def stop(self, owner: str, id_: str) -> None:
        """It was cancelled, or deleted, in the store."""
        if run := self._runs.get((owner, id_)):
            run.stopped = True
            run.stop("cancelled by its client")

    async def over(self, key: Key, client: str) -> None:
        """Wait until a run of another process has ended. client: the address that waits. Raises GatewayError 429."""
        self._some.set()
        await self.watched.over(key, client)

    def __len__(self) -> int:
        return len(self._runs)

    async def _run(self, run: Run, request: RunRequest, caller: Caller, serve: Serve) -> None:
        progress = asyncio.get_running_loop().create_task(self._recording.progress(run))
        try:
            run.begun = True
            if not (run.stopped or self._recording.closing):
                await serve(request, request.parsed(), caller)
                await run.keep_whole()
        except (asyncio.CancelledError, ConnectionError):
            if not (run.stopped or self._recording.interrupted):
                raise
        finally:
            run.settling = True
            progress.cancel()
            request.close()
            try:
                await self._recording.settle(run)
            finally:
                del self._runs[run.key]
                self.places.release(run.key[0], run.client)
                self.logs.end(run.key, self._timer())

    # -- beside the requests

    async def run(self) -> None:
        """See that the runs that were ended elsewhere stop, and say that this process lives; for ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(TICK_S)
            try:
                await self._look()
            except StoreFailed as failure:
                log.warning("the runs in the background cannot be looked after", extra={"reason": str(failure)})
            self.logs.expire(self._timer())
            if not (self._runs or len(self.watched) or len(self.logs)):
                self._some.clear()

    async def _look(self) -> None:
        """Raises StoreFailed."""
        mine, theirs = list(self._runs.values()), self.watched.keys()
        if not (mine or theirs):
            return
        store = await self.opened()
        going = await store.going_of(self.runner, theirs)
        for run in mine:
            if run.key not in going and not run.keeping:
                self.stop(*run.key)
        self.watched.end_all_but(going, theirs)
        if mine and self._timer() - self._renewed >= RENEW_S:
            await store.renew(self.runner, [run.id for run in mine])
            self._renewed = self._timer()

    async def close(self) -> None:
        """What has not ended fails. Idempotent."""
        self._recording.closing = True
        tasks = [*self._beginnings.withdrawals, *(run.task for run in self._runs.values() if run.task)]
        for run in tuple(self._runs.values()):
            run.stop("the gateway goes down")
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        return f"<Runs {len(self._runs)} running, {len(self.watched)} watched, {self.logs!r}>"
