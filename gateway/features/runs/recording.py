"""Writes the progress and the end of a run to the store, then sends the same end to its followers.

The store decides how a run has ended (`stored_runs.py`). While it does not answer, the end waits, at most SETTLE_S. Then the
followers get the error that the end is lost, because their next requests are answered from the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.database.failures import StoreError, StoreFailed
from gateway.features.histories.records import CANCELLED, FAILED, RUNNING, Item, RunEnd
from gateway.features.runs.run import Run
from gateway.features.runs.run_format import LOST, RESTARTED
from gateway.request.running import RunningRequests
from gateway.telemetry.counters import Counter

if TYPE_CHECKING:
    from gateway.features.runs.run import OpenStore

log = logging.getLogger("warmroute.state")

SETTLE_S: Final = 600.0  # longest wait of an end for the store
RETRY_S: Final = 1.0


class RunRecorder:
    """closing: this process ends; set by `Runs`. ended: counter by status. timer: monotonic seconds."""

    def __init__(self, open_store: OpenStore, running: RunningRequests, ended: Counter, timer: Callable[[], float]) -> None:
        self.closing = False
        self._open_store = open_store
        self._running = running
        self._ended = ended
        self._timer = timer

    @property
    def interrupted(self) -> bool:
        """True if runs end because the gateway shuts down."""
        return self.closing or self._running.over

    async def progress(self, run: Run) -> None:
        """Stores the status in progress when a replica answers."""
        await run.progressed.wait()
        try:
            await (await self._open_store()).progress(*run.key, run.response)
        except StoreFailed as failure:
            log.warning("the status of a run could not be stored", extra={"response": run.id, "reason": str(failure)})

    async def settle(self, run: Run) -> None:
        """Stores the end of a run, and sends it to its followers."""
        status, until = "", self._timer() + SETTLE_S
        while not status:
            try:
                status = await self._store_end(run)
            except StoreFailed as failure:
                log.warning("the end of a run is not stored yet", extra={"response": run.id, "reason": str(failure)})
                if self.closing or self._timer() > until:
                    break
                await asyncio.sleep(RETRY_S)
            except Exception:  # a bug: the followers must still get an end
                log.exception("the end of a run cannot be stored", extra={"response": run.id})
                break
        if not run.end_sent:
            failed = run.format.in_state(run.response, FAILED, RESTARTED if self.closing else LOST)
            run.add_last_event(run.format.last_event(failed, run.log.next))
        self._ended.add((status or FAILED,))

    async def _store_end(self, run: Run) -> str:
        """The status at the end. Raises StoreFailed."""
        store, turn = await self._open_store(), run.turn
        if not (turn and turn.stored):
            end, items, conversation = self._end(run)
            try:
                await run.finish(end, items, conversation)
            except StoreFailed:
                raise
            except StoreError:  # its conversation was deleted or is full
                assert turn
                turn.unwritten = None
                await run.finish(self._end(run)[0])
        try:
            found = await store.get(*run.key)
            status, response = found.status, found.response
        except StoreFailed:
            raise
        except StoreError:  # it was deleted
            status, response = CANCELLED, run.format.in_state(run.response, CANCELLED)
        if not run.end_sent:
            run.add_last_event(run.format.last_event(response, run.log.next))
        return status if status not in RUNNING else FAILED

    def _end(self, run: Run) -> tuple[RunEnd, list[Item], str]:
        """The end to store, unless the run has already ended. Also items and id of its conversation."""
        turn = run.turn
        if turn and turn.unwritten:
            end, items = turn.unwritten
            return end, items, turn.client_history.conversation
        reason = RESTARTED if self.interrupted else run.reason()
        return RunEnd(FAILED, b"", run.format.in_state(run.response, FAILED, reason)), [], ""

    def __repr__(self) -> str:
        return f"<RunRecorder{', closing' if self.closing else ''}>"
