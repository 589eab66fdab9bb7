"""Which requests run, and how far the shutdown is.

    serving ── SIGTERM ──► leaving (balancers are to stop sending: /ready is 503, answers close their connections)
            ── stop ──► draining (nothing new is accepted, what runs may finish) ── time is up ──► over (what is left is ended)

A client that has just had an answer that did not announce the end may have sent its next request: so idle for a moment is not
idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

LAST_WRITES_S: Final = 1.0  # for writing errors to clients
# A request on its way arrives within these rounds of the loop. Not a time: a process that was frozen has read nothing in it.
ROUNDS, ROUND_S = 20, 0.01

CloseIdle = Callable[[], bool]
"""Closes connections on which nothing is under way; whether there are others, on which a request may just have come."""


class Running:
    """leaving: clients should use other gateways. draining: the gateway is going down, and so is leaving, too. over: its
    requests must end now.
    """

    def __init__(self) -> None:
        self.leaving = False
        self.draining = False
        self.over = False
        self._entered = 0  # requests that have begun
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._told = set[Callable[[], None]]()

    def tell(self, draining: Callable[[], None]) -> None:
        """To be called once the gateway goes down: for connections that would stay open with nothing running on them."""
        self._told.add(draining)

    def forget(self, draining: Callable[[], None]) -> None:
        """Undo `tell`. Idempotent."""
        self._told.discard(draining)

    def begin_leaving(self) -> None:
        """The gateway will go down; until then it serves whatever comes. Idempotent."""
        self.leaving = True

    def drain(self) -> None:
        """The gateway goes down. Idempotent."""
        self.begin_leaving()
        if not self.draining:
            self.draining = True
            for tell in tuple(self._told):
                tell()

    def enter(self) -> asyncio.Task[object]:
        """A request begins, in the task that serves it; the task is to be given back to `leave` in a `finally`."""
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self._idle.clear()
        self._entered += 1
        self._running.add(task)
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    async def wait(self, timeout_s: float, hurry: asyncio.Event, close_idle: CloseIdle = lambda: False) -> None:
        """Let requests finish, for timeout_s or until `hurry`; then cancel the rest and let them send their errors. No client's
        connection is idle then: a request on it would not be waited for.
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
        """Until nothing runs, nothing has come for a while, and nothing can come any more."""
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
        return f"<Running {state}, {len(self._running)} running>"
