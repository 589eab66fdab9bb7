"""Going down with grace: which requests run, and how far the shutdown is.

    running ── stop ──► draining (nothing new is accepted, what runs may finish) ── time is up ──► over (what is left is ended)

aiohttp would wait twice as long as it is told to, and end what is left without a word; so this is ours.
"""

from __future__ import annotations

import asyncio
from typing import Final

LAST_WORDS_S: Final = 1.0  # for writing the last words to clients that read


class Drain:
    """draining: the gateway is going down. over: its requests must end now."""

    def __init__(self) -> None:
        self.draining = False
        self.over = False
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> asyncio.Task[object]:
        """A request begins, in the task that serves it; the task is to be given back to `leave` in a `finally`."""
        task = asyncio.current_task()
        assert task is not None
        if not self._running:
            self._idle.clear()
        self._running.add(task)
        return task

    def leave(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    async def wait(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Let what runs finish, for so long or until `hurry`; then cancel what is left and let it say so."""
        self.draining = True
        idle, hurried = asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(hurry.wait())
        await asyncio.wait([idle, hurried], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        self.over = True
        for task in tuple(self._running):
            task.cancel()
        await asyncio.wait([idle], timeout=LAST_WORDS_S)
        idle.cancel()

    def __repr__(self) -> str:
        state = "over" if self.over else "draining" if self.draining else "up"
        return f"<Drain {state}, {len(self._running)} running>"
