"""The events of runs in the background, in memory: for clients that follow, and for those that come back.

    add ──► the log of a run: its newest events, numbered without a gap ──► since(N): what a client has not got

A log holds MAX_LOG bytes, all logs of a process MAX_LOGS, and each byte is charged to the memory budget, to the client that has
asked for the run. Where there is no room the oldest events go: first those of runs that ended first, then the run's own. A run
is never held back by who follows it. Logs of runs that have ended are held for HELD_S, MAX_ENDED of them.

Invariants: a log's size is that of its events; `Logs.size` the sum of its logs' sizes. Adding is O(1) and
O(followers) where some wait, but for dropping; reading is O(events before).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from gateway.admission.memory import MemoryLease

MAX_LOG: Final = 4 << 20  # bytes
MAX_LOGS: Final = 64 << 20
LOGS_SHARE: Final = 10  # of the memory budget they have a tenth at most
MAX_ENDED: Final = 1000
HELD_S: Final = 300.0
SLICE: Final = 64 << 10  # bytes that are taken at once

Key = tuple[str, str]
"""(owner, id) of a response."""


class EventLog:
    """Of one run. first: the number of the oldest event that is held; next: that of the next one. ended: there is none."""

    __slots__ = ("_changed", "_events", "_lease", "ended", "first", "size")

    def __init__(self, lease: MemoryLease) -> None:
        """lease: of its own, for its bytes."""
        self.first = 0
        self.size = 0
        self.ended = False
        self._events = deque[bytes]()
        self._lease = lease
        self._changed: dict[asyncio.Future[None], None] = {}  # who waits, in their order

    @property
    def next(self) -> int:
        return self.first + len(self._events)

    @property
    def followers(self) -> int:
        """How many wait for the next event."""
        return len(self._changed)

    def since(self, after: int) -> tuple[bytes, int] | None:
        """Events after this number, SLICE bytes of them, or one; and the last one's number. None: the first of them is gone."""
        at = after + 1 - self.first
        if at < 0:
            return None
        taken, size = list[bytes](), 0
        while at < len(self._events) and (not taken or size + len(self._events[at]) <= SLICE):
            taken.append(self._events[at])
            size += len(self._events[at])
            at += 1
        return b"".join(taken), after + len(taken)

    async def changed(self) -> None:
        """Wait until there is something new."""
        waiter = asyncio.get_running_loop().create_future()
        self._changed[waiter] = None
        try:
            await waiter
        finally:
            self._changed.pop(waiter, None)

    def append(self, event: bytes) -> bool:
        """False: there is no memory for it. For `Logs` only, as the methods below."""
        self._events.append(event)
        self.size += len(event)
        self._wake()
        return self.charge(len(event))

    def charge(self, size: int) -> bool:
        return self._lease.grow(size)

    def drop(self, *, charged: bool = True) -> int:
        """The oldest event. Returns its size. charged: it was."""
        size = len(self._events.popleft())
        self.first += 1
        self.size -= size
        if charged:
            self._lease.shrink(size)
        return size

    def end(self) -> None:
        self.ended = True
        self._wake()

    def clear(self) -> int:
        """Returns the bytes that it had."""
        size, self.size, self.first = self.size, 0, self.next
        self._events.clear()
        self._lease.close()
        return size

    def _wake(self) -> None:
        waiting, self._changed = self._changed, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.size == sum(map(len, self._events)) <= self._lease.held or not self._lease.open

    def __repr__(self) -> str:
        return f"<EventLog {self.first}..{self.next}, {self.size} bytes{', ended' if self.ended else ''}>"


class Logs:
    """Of one process. most: bytes of a log; most_of_all: of all logs; ended: how many that have ended."""

    def __init__(self, most: int = MAX_LOG, most_of_all: int = MAX_LOGS, ended: int = MAX_ENDED) -> None:
        self.size = 0
        self._most = most
        self._most_of_all = most_of_all
        self._most_ended = ended
        self._logs: dict[Key, EventLog] = {}
        self._ended: dict[Key, float] = {}  # when, the oldest first

    def open(self, key: Key, lease: MemoryLease) -> EventLog:
        log = self._logs[key] = EventLog(lease)
        return log

    def find(self, key: Key) -> EventLog | None:
        return self._logs.get(key)

    def add(self, log: EventLog, event: bytes) -> None:
        """The next event of a run."""
        self.size += len(event)
        charged = log.append(event)
        while not charged and log.size > len(event):  # what is older makes room
            self.size -= log.drop()
            charged = log.charge(len(event))
        if not charged:
            self.size -= log.drop(charged=False)
        while log.size > self._most and log.size > len(event):
            self.size -= log.drop()
        while self.size > self._most_of_all and self._ended:
            self.forget(next(iter(self._ended)))
        while self.size > self._most_of_all and log.size:
            self.size -= log.drop()

    def end(self, key: Key, now: float) -> None:
        """A run has ended. now: seconds, of any clock."""
        self._logs[key].end()
        self._ended[key] = now
        if len(self._ended) > self._most_ended:
            self.forget(next(iter(self._ended)))

    def forget(self, key: Key) -> None:
        """Idempotent."""
        self._ended.pop(key, None)
        if log := self._logs.pop(key, None):
            log.end()
            self.size -= log.clear()

    def expire(self, now: float) -> None:
        """Forget those that have ended HELD_S ago."""
        while self._ended and next(iter(self._ended.values())) <= now - HELD_S:
            self.forget(next(iter(self._ended)))

    def keys(self) -> list[Key]:
        return list(self._logs)

    def __len__(self) -> int:
        return len(self._logs)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert self.size == sum(log.size for log in self._logs.values())
        assert self._ended.keys() <= self._logs.keys()
        assert len(self._ended) <= self._most_ended
        for log in self._logs.values():
            log.check()

    def __repr__(self) -> str:
        return f"<Logs {len(self._logs)}, {len(self._ended)} ended, {self.size} bytes>"
