"""The running requests, and the stage of a shutdown.

    serving ── SIGTERM ──► leaving (balancers should stop sending: /ready is 503, answers close their connections)
            ── stop ──► draining (accepts nothing new, running requests may finish) ── time is up ──► over (cancels the rest)

A client whose last answer did not close the connection may have sent its next request already. So a short idle moment is not
yet the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from gateway.request.exchange import Exchange

LAST_WRITES_S: Final = 1.0  # for writing errors to clients
# A request that was sent already arrives within these rounds of the loop. Not a time, because a suspended process reads
# nothing.
ROUNDS, ROUND_S = 20, 0.01

CloseIdle = Callable[[], bool]
"""Closes idle connections. Returns True if others are left, on which a request may just have arrived."""


class RunningRequests:
    """leaving: clients should use other gateways. draining: the gateway goes down; implies leaving. over: running requests must
    end now.
    """

    def __init__(self) -> None:
        self.leaving = False
        self.draining = False
        self.over = False
        self._entered = 0  # number of requests that have begun
        self._running: dict[asyncio.Task[object], Exchange | None] = {}
        self._idle = asyncio.Event()  # kept only while the gateway goes down: nothing runs
        self._told = set[Callable[[], None]]()

    def tell(self, draining: Callable[[], None]) -> None:
        """Register a callback for the start of draining: for connections that would stay open without running requests."""
        self._told.add(draining)

    def forget(self, draining: Callable[[], None]) -> None:
        """Undo `tell`. Idempotent."""
        self._told.discard(draining)

    def begin_leaving(self) -> None:
        """The gateway will go down; until then it serves all requests. Idempotent."""
        self.leaving = True

    def drain(self) -> None:
        """The gateway goes down. Idempotent."""
        self.begin_leaving()
        if not self.draining:
            self.draining = True
            if not self._running:
                self._idle.set()
            for tell in tuple(self._told):
                tell()

    @property
    def exchanges(self) -> Iterator[Exchange]:
        """The running requests, the oldest first."""
        return filter(None, self._running.values())

    @property
    def newest(self) -> Iterator[Exchange]:
        """The running requests, the newest first."""
        return filter(None, reversed(self._running.values()))

    def enter(self, exchange: Exchange | None = None) -> asyncio.Task[object]:
        """A request begins in the current task. Returns the task, for `leave` in a `finally`."""
        task = exchange.request.task if exchange is not None else None
        if task is None:
            task = asyncio.current_task()  # plain Python
        assert task is not None
        if self.draining:
            self._idle.clear()
        self._entered += 1
        self._running[task] = exchange
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        if task in self._running:
            del self._running[task]
        if self.draining and not self._running:
            self._idle.set()

    async def wait(self, timeout_s: float, hurry: asyncio.Event, close_idle: CloseIdle = lambda: False) -> None:
        """Let requests finish, for timeout_s or until `hurry`; then cancel the rest and let them send their errors. No client's
        connection may be idle then: a request on it would not be awaited.
        """
        self.drain()
        finished, hurried = asyncio.ensure_future(self._finished(close_idle)), asyncio.ensure_future(hurry.wait())
        await asyncio.wait([finished, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        hurried.cancel()
        self.over = True
        for task in tuple(self._running):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITES_S):
                await self._idle.wait()
        close_idle()

    async def _finished(self, close_idle: CloseIdle) -> None:
        """Wait until nothing runs, nothing has arrived for a while, and nothing can arrive."""
        closed = False
        while True:
            await self._idle.wait()
            entered = self._entered
            for _ in range(ROUNDS):
                await asyncio.sleep(ROUND_S)
            quiet = self._idle.is_set() and self._entered == entered
            if quiet and (closed or not close_idle()):
                return
            closed = quiet

    def __repr__(self) -> str:
        state = "over" if self.over else "draining" if self.draining else "leaving" if self.leaving else "up"
        return f"<RunningRequests {state}, {len(self._running)} running>"
