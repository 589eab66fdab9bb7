"""Lag of the event loop: the part of a request's time that the gateway, or its machine, causes.

A callback is due every TICK_S. Its delay is the waiting time of every other ready callback: for a step that took too long, or
for a CPU. It costs four timers a second, and no task: waking one takes four times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.telemetry.counters import Histogram

TICK_S: Final = 0.25


class LoopLag:
    """Measures the lag (see the module). clock: monotonic seconds."""

    def __init__(self, late: Histogram, clock: Callable[[], float]) -> None:
        self._late = late
        self._clock = clock
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        self._next(loop)
        try:
            await loop.create_future()  # for ever
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self.expect()
        self._timer = loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self.awake()
        finally:
            self._next(loop)

    def expect(self) -> None:
        """A tick begins."""
        self._due = self._clock() + TICK_S

    def awake(self) -> None:
        """A tick ends. A timer may fire early by its resolution, which is no lag."""
        self._late.observe((), max(0.0, self._clock() - self._due))

    def __repr__(self) -> str:
        return f"<LoopLag, due at {self._due:g}>"
