"""A clock that a test moves, and a simulated engine with events for what it is asked."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

from replica.engine import Detokenizer, EngineRequest, Sequence
from replica.sim.engine import SimEngine
from replica.sim.text import WordDetokenizer


class FakeTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Time stands still until `advance`, which runs what is due in order; or it passes by itself, in `running`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._running = False
        self._order = itertools.count()
        self._due: list[tuple[float, int, FakeTimer, Callable[..., object], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> FakeTimer:
        timer = FakeTimer()
        heapq.heappush(self._due, (when, next(self._order), timer, callback, args))
        self._schedule()
        return timer

    def advance(self, seconds: float) -> None:
        until = self._now + seconds
        while self._due and self._due[0][0] <= until + 1e-9:
            when, _, timer, callback, args = heapq.heappop(self._due)
            self._now = max(self._now, when)
            if not timer.cancelled:
                callback(*args)
        self._now = until

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever is due next happens as soon as the event loop gets to it."""
        self._running = True
        self._schedule()
        try:
            yield
        finally:
            self._running = False

    def _schedule(self) -> None:
        if self._running:
            asyncio.get_running_loop().call_soon(self._run_next)

    def _run_next(self) -> None:
        if self._running and self._due:
            self.advance(max(0.0, self._due[0][0] - self._now))
            self._schedule()

    def lag(self, seconds: float) -> None:
        """Time passes, and nothing that is due happens yet."""
        self._now += seconds

    def stall(self, seconds: float) -> None:
        """Time passes, and nothing that is due happens before its end."""
        self.lag(seconds)
        self.advance(0)


class WatchedEngine(SimEngine):
    """A simulated engine with an event for each submission and each cancellation. `broken`: why it has stopped, if it has.
    `spelling_error`: what decoding its tokens raises, if anything."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.submitted = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.submissions = asyncio.Semaphore(0)
        self.broken: str | None = None
        self.spelling_error: Exception | None = None

    def submit(self, request: EngineRequest) -> Sequence:
        sequence = super().submit(request)
        self.submitted.set()
        self.submissions.release()
        return sequence

    def detokenizer(self, special: bool = False) -> Detokenizer:
        return _BreakableDetokenizer(self)

    def failure(self) -> str | None:
        return self.broken

    def cancel(self, sequence: Sequence) -> None:
        super().cancel(sequence)
        self.cancelled.set()


class _BreakableDetokenizer(WordDetokenizer):
    def __init__(self, engine: WatchedEngine) -> None:
        super().__init__()
        self._engine = engine

    def push(self, tokens: Items[int]) -> str:
        if self._engine.spelling_error is not None:
            raise self._engine.spelling_error
        return super().push(tokens)
