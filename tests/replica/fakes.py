"""A clock that a test moves, and an engine that tells when it was asked something."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from replica.engine import Request, Sequence
from replica.sim import SimEngine


class FakeTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Time stands still until `advance`, which runs what is due in order."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, FakeTimer, Callable[..., object], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> FakeTimer:
        timer = FakeTimer()
        heapq.heappush(self._due, (when, next(self._order), timer, callback, args))
        return timer

    def advance(self, seconds: float) -> None:
        until = self._now + seconds
        while self._due and self._due[0][0] <= until + 1e-9:
            when, _, timer, callback, args = heapq.heappop(self._due)
            self._now = max(self._now, when)
            if not timer.cancelled:
                callback(*args)
        self._now = until

    def stall(self, seconds: float) -> None:
        """Time passes, and nothing that is due happens before its end."""
        self._now += seconds
        self.advance(0)


class WatchedEngine(SimEngine):
    """A simulated engine with an event for each submission and each cancellation."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.submitted = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.broken: str | None = None

    def submit(self, request: Request) -> Sequence:
        sequence = super().submit(request)
        self.submitted.set()
        return sequence

    def failure(self) -> str | None:
        return self.broken

    def _cancel(self, sequence: Sequence) -> None:
        super()._cancel(sequence)
        self.cancelled.set()
