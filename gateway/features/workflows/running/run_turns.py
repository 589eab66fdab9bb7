"""Turns of all runs of a process: how long they hold the event loop between two of its own turns.

    a happening ──► a turn of its run, with the work that is left ──► work is left, or the run waits for its next turn
    next turn of the event loop ──► all work is back ──► waiting runs, the longest wait first

Work is counted as `WorkBudget` counts it. A turn completes the step that exceeds the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.features.workflows.running.scheduler import TURN_WORK


class RunTurns:
    """The work of all runs in this turn of the event loop, and the turns of runs that wait for the next one.

    left: units of work, of about a nanosecond; not positive: none.
    """

    def __init__(self) -> None:
        self.left = TURN_WORK
        self._waiting: dict[Callable[[], None], None] = {}  # in order
        self._next: asyncio.Handle | None = None

    def spend(self, work: int) -> None:
        if work:
            self.left -= work
            self._schedule()

    def wait(self, turn: Callable[[], None]) -> None:
        """Call this in a later turn of the event loop, after all that wait already."""
        self._waiting.setdefault(turn)
        self._schedule()

    def forget(self, turn: Callable[[], None]) -> None:
        self._waiting.pop(turn, None)

    def _schedule(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next, self.left = None, TURN_WORK
        waiting = len(self._waiting)
        while waiting and self._waiting and self.left > 0:  # an unfinished run waits again, at the end
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            waiting -= 1
            if self._waiting:
                self._schedule()  # before the turn, which may fail
            turn()
