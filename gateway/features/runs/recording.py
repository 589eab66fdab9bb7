"""Writes the progress and the end of a run to the store, then sends the same end to its clients.

The store decides how a run has ended (`stored_runs.py`). While it does not answer, the end waits, SETTLE_S at most. Then the
run's clients get the error that it is lost, because their next requests are answered from the store alone.
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
    from gateway.features.runs.run import Opened

log = logging.getLogger("warmroute.state")

SETTLE_S: Final = 600.0  # that an end waits for the store
RETRY_S: Final = 1.0


class RunRecorder:
    """See the top of this file. closing: the process ends; set by `Runs`. ended: counter by status. timer: monotonic
    seconds.
    """

    def __init__(self, opened: Opened, running: RunningRequests, ended: Counter, timer: Callable[[], float]) -> None:
        self.closing = False
        self._opened = opened
        self._running = running
        self._ended = ended
        self._timer = timer

    @property
    def interrupted(self) -> bool:
        """Whether runs end now because the gateway shuts down."""
        return self.closing or self._running.over

    async def progress(self, run: Run) -> None:
        """Store the status once a replica answers."""
        await run.progressed.wait()
        try:
            await (await self._opened()).progress(*run.key, run.response)
        except StoreFailed as failure:
            log.warning("the store does not say that a run is in progress", extra={"response": run.id, "reason": str(failure)})

    async def settle(self, run: Run) -> None:
        """Store the end of a run, and send it to its clients."""
        status, until = "", self._timer() + SETTLE_S
        while not status:
            try:
                status = await self._settled(run)
            except StoreFailed as failure:
                log.warning("the end of a run is not kept yet", extra={"response": run.id, "reason": str(failure)})
                if self.closing or self._timer() > until:
                    break
                await asyncio.sleep(RETRY_S)
            except Exception:  # a bug, which must not cost the run's clients its end
                log.exception("the end of a run cannot be kept", extra={"response": run.id})
                break
        if not run.told:
            failed = run.format.in_state(run.response, FAILED, RESTARTED if self.closing else LOST)
            run.say_last(run.format.last_event(failed, run.log.next))
        self._ended.add((status or FAILED,))

    async def _settled(self, run: Run) -> str:
        """Its status at the end. Raises StoreFailed."""
        store, turn = await self._opened(), run.turn
        if not (turn and turn.stored):
            end, items, conversation = self._end(run)
            try:
                await run.finish(end, items, conversation)
            except StoreFailed:
                raise
            except StoreError:  # its conversation is gone, or full
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
        if not run.told:
            run.say_last(run.format.last_event(response, run.log.next))
        return status if status not in RUNNING else FAILED

    def _end(self, run: Run) -> tuple[RunEnd, list[Item], str]:
        """The end to store, unless the run has ended before: also items and id of its conversation."""
        turn = run.turn
        if turn and turn.unwritten:
            end, items = turn.unwritten
            return end, items, turn.told.conversation
        reason = RESTARTED if self.interrupted else run.reason()
        return RunEnd(FAILED, b"", run.format.in_state(run.response, FAILED, reason)), [], ""

    def __repr__(self) -> str:
        return f"<Recording{', closing' if self.closing else ''}>"
