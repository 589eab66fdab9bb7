"""The events of background runs, in memory, for clients that follow a run or return to it.

    add ──► the log of a run: its latest events, numbered without gaps ──► since(N): the events after number N

A log holds at most MAX_LOG bytes, all logs of a process MAX_LOGS. Each byte is charged to the memory budget of the client that
started the run. Without room, the oldest events are dropped: first events of the runs that ended first, then the run's own.
Followers never delay a run. Logs of ended runs are held for HELD_S, at most MAX_ENDED of them.

Invariants: a log's size is the sum of its events' sizes; `Logs.size` is the sum of its logs' sizes. Adding is O(1), or
O(followers) if some wait, plus dropped events. Reading is O(earlier events).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from gateway.admission.memory import MemoryLease

MAX_LOG: Final = 4 << 20  # bytes
MAX_LOGS: Final = 64 << 20
LOGS_SHARE: Final = 10  # all logs take at most this part (one tenth) of the memory budget
MAX_ENDED: Final = 1000
HELD_S: Final = 300.0
SLICE: Final = 64 << 10  # bytes per read

Key = tuple[str, str]
"""(owner, id) of a response."""


class EventLog:
    """The events of one run. first: number of the oldest held event. next: number of the next event. ended: no more events
    follow.
    """

    __slots__ = ("_changed", "_events", "_lease", "ended", "first", "size")

    def __init__(self, lease: MemoryLease) -> None:
        """lease: for the bytes of this log only."""
        self.first = 0
        self.size = 0
        self.ended = False
        self._events = deque[bytes]()
        self._lease = lease
        self._changed: dict[asyncio.Future[None], None] = {}  # waiting followers, in order

    @property
    def next(self) -> int:
        return self.first + len(self._events)

    @property
    def followers(self) -> int:
        """Number of followers that wait for the next event."""
        return len(self._changed)

    def since(self, after: int) -> tuple[bytes, int] | None:
        """The events after this number, up to SLICE bytes or one event, and the number of the last one. None: the first of them
        was dropped.
        """
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
        """Waits for the next event or the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._changed[waiter] = None
        try:
            await waiter
        finally:
            self._changed.pop(waiter, None)

    def append(self, event: bytes) -> bool:
        """Adds an event. False: it could not be charged. To be called by `Logs` only, as the methods below."""
        self._events.append(event)
        self.size += len(event)
        self._wake()
        return self.charge(len(event))

    def charge(self, size: int) -> bool:
        return self._lease.grow(size)

    def drop(self, *, charged: bool = True) -> int:
        """Drops the oldest event. Returns its size. charged: its size was charged."""
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
        """Drops all events. Returns their size in bytes."""
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
    """The logs of one process. max_log: bytes of a log. max_logs: bytes of all logs. max_ended: logs of ended runs."""

    def __init__(self, max_log: int = MAX_LOG, max_logs: int = MAX_LOGS, max_ended: int = MAX_ENDED) -> None:
        self.size = 0
        self._max_log = max_log
        self._max_logs = max_logs
        self._max_ended = max_ended
        self._logs: dict[Key, EventLog] = {}
        self._ended: dict[Key, float] = {}  # end times, the oldest first

    def open(self, key: Key, lease: MemoryLease) -> EventLog:
        log = self._logs[key] = EventLog(lease)
        return log

    def find(self, key: Key) -> EventLog | None:
        return self._logs.get(key)

    def add(self, log: EventLog, event: bytes) -> None:
        """Adds the next event of a run."""
        self.size += len(event)
        charged = log.append(event)
        while not charged and log.size > len(event):  # older events make room
            self.size -= log.drop()
            charged = log.charge(len(event))
        if not charged:
            self.size -= log.drop(charged=False)
        while log.size > self._max_log and log.size > len(event):
            self.size -= log.drop()
        while self.size > self._max_logs and self._ended:
            self.forget(next(iter(self._ended)))
        while self.size > self._max_logs and log.size:
            self.size -= log.drop()

    def sent(self, log: EventLog, number: int) -> None:
        """Drops the events up to this number: the only reader of this log has them. O(dropped events)."""
        while log.first <= number and log.size:
            self.size -= log.drop()

    def end(self, key: Key, now: float) -> None:
        """The run has ended. now: seconds of any clock, the same as in `expire`."""
        self._logs[key].end()
        self._ended[key] = now
        if len(self._ended) > self._max_ended:
            self.forget(next(iter(self._ended)))

    def forget(self, key: Key) -> None:
        """Drops a log. Idempotent."""
        self._ended.pop(key, None)
        if log := self._logs.pop(key, None):
            log.end()
            self.size -= log.clear()

    def expire(self, now: float) -> None:
        """Drops the logs of runs that ended HELD_S ago."""
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
        assert len(self._ended) <= self._max_ended
        for log in self._logs.values():
            log.check()

    def __repr__(self) -> str:
        return f"<Logs {len(self._logs)}, {len(self._ended)} ended, {self.size} bytes>"
