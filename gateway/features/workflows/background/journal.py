"""The journal of one run: one write at a time, in the order of the outcomes.

record ──► durable ──► the run goes on
     └──► the store does not answer: again, every RETRY_S, until the run is cancelled
     └──► another gateway has the run: `lost` is called, and nothing goes on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.database.failures import StoreFailed
from gateway.features.histories.histories import full
from gateway.features.histories.records import StoreFullError
from gateway.features.workflows.background.stored_run import CALLED, RunKey, StepRow, row_of
from gateway.features.workflows.running.recorded import RecordedStep, ResumedRun, RunJournal, RunProgress

if TYPE_CHECKING:
    from gateway.features.workflows.background.store import WorkflowRunStore

log = logging.getLogger("warmroute.workflows")

RETRY_S: Final = 1.0


class StoredRunJournal(RunJournal):
    """key: of the run. runner: this process. lost: called if another gateway has the run. going_down: True while calls are cut
    off because this gateway goes down: such outcomes are none. ending: its end is stored, or will be.
    """

    def __init__(
        self,
        store: WorkflowRunStore,
        key: RunKey,
        runner: str,
        lost: Callable[[], None],
        going_down: Callable[[], bool],
        resumed: ResumedRun | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        self.resumed = resumed
        self.ending = False
        self._store = store
        self._key = key
        self._runner = runner
        self._lost = lost
        self._going_down = going_down
        self._retry_s = retry_s
        self._position = resumed.position if resumed is not None else 0
        self._one_at_a_time = asyncio.Lock()

    async def call(self, name: str) -> None:
        await self._record(StepRow(name, CALLED), None)

    async def record(self, step: RecordedStep, progress: RunProgress) -> None:
        await self._record(row_of(step), progress)

    async def end(self, status: str, run: Mapping[str, Any], number: int) -> None:
        self.ending, result = True, orjson.dumps(run)
        await self._durable(lambda: self._store.finish(self._key, self._runner, status, result, number))

    async def _record(self, row: StepRow, progress: RunProgress | None) -> None:
        async with self._one_at_a_time:
            position, self._position = self._position, self._position + 1
            await self._durable(lambda: self._store.record(self._key, self._runner, position, row, progress))

    async def _durable(self, write: Callable[[], Awaitable[bool]]) -> None:
        """Raises GatewayError if the store is full."""
        waits = False
        while True:
            if self._going_down():
                await _forever()
            try:
                if await write():
                    return
                self.ending = False
                self._lost()
                await _forever()
            except StoreFullError as failure:
                raise full(failure) from None
            except StoreFailed as failure:
                if not waits:
                    log.warning("a run waits for its store", extra={"run": self._key[1], "reason": str(failure)})
                waits = True
                await asyncio.sleep(self._retry_s)


async def _forever() -> None:
    """Until the task is cancelled."""
    await asyncio.get_running_loop().create_future()
