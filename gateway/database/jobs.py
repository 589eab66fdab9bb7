"""Work in a thread that its caller may give up: its statement is interrupted, and it does not commit.

    caller (event loop) ── run ──► Job ──► a thread of the pool: begin(handle) ... end()
           └── cancelled ── give up ──► handle.interrupt()

A handle is interrupted only between `begin` and `end`: afterwards it is another job's.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class GivenUpError(Exception):
    """Nobody waits for it any more."""


class Job:
    """See the top of this file."""

    __slots__ = ("_given_up", "_handle", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: sqlite3.Connection | None = None
        self._given_up = False

    def begin(self, handle: sqlite3.Connection) -> None:
        """Raises GivenUpError."""
        with self._lock:
            self.check()
            self._handle = handle

    def check(self) -> None:
        """Raises GivenUpError."""
        if self._given_up:
            raise GivenUpError

    def end(self) -> None:
        with self._lock:
            self._handle = None

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self._handle:
                self._handle.interrupt()


async def run(pool: ThreadPoolExecutor, work: Callable[[Job], T]) -> T:
    """What `work` returns or raises, in a thread of the pool. Whoever is cancelled gives it up."""
    job = Job()
    try:
        return await asyncio.wrap_future(pool.submit(work, job))
    except asyncio.CancelledError:
        job.give_up()
        raise
