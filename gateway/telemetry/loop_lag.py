"""Lag of the event loop: the part of a request's time that the gateway, or its machine, causes.

A callback is due every TICK_S. Its delay is the waiting time of every other ready callback: for a step that took too long, or
for a CPU. It costs four wake-ups a second.
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

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self.expect()
            await asyncio.sleep(TICK_S)
            self.awake()

    def expect(self) -> None:
        """A tick begins."""
        self._due = self._clock() + TICK_S

    def awake(self) -> None:
        """A tick ends. A timer may fire early by its resolution, which is no lag."""
        self._late.observe((), max(0.0, self._clock() - self._due))

    def __repr__(self) -> str:
        return f"<LoopLag, due at {self._due:g}>"
