"""Bounds the work per turn of the event loop: parsing of received data, and CPU time over all connections.

A read returns up to 256 KiB, most of which is cheap to pass on. But each line end may end a chunk, a header or an event, which
costs work: a peer that sends little else could block the event loop for a second. So could many connections with little data
each: `Turns` bounds the time of all of them together, and `shares.py` the time that the bodies of one client take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from gateway.shares import LoopShares

AT_ONCE: Final = 4096  # bytes that are always parsed at once
SMALL: Final = 512  # bytes parsed at once even while `Turns` is busy: a probe or a scrape
BYTE_S: Final = 0.0000003  # upper bound of a byte's parsing time: tiny chunks
LARGE: Final = 32 << 10  # bytes of a replica's answer after which the next read is in another turn
TURN_S: Final = 0.0005  # per connection: deferred data, or reconstruction of a broken stream
ALL_S: Final = 0.004  # per turn of the event loop: all work that goes through `Turns`
_LINES: Final = 256  # line ends per part, if evenly spread

T = TypeVar("T")


class Turns:
    """Queue of long work of all connections of one event loop. Once work has taken ALL_S in a turn of the loop, no further work
    starts in that turn; the rest is queued for the next turns, FIFO. Running work is not interrupted.

    client: whose share of the loop the work takes (`shares.py`); "": nobody's.
    """

    __slots__ = ("_locks", "_one", "_shares", "_spent_s", "_waiting", "free")

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], object]]()
        self._spent_s = 0.0  # since the budget was last exceeded, possibly over several turns
        self.free = True  # work may run at once and be reported by `spent`
        self._shares = LoopShares()
        self._one = asyncio.Lock()  # held during a call outside of the loop
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # by client; held from its turn to the end of its call

    def spent(self, seconds: float) -> None:
        """Report work that ran at once."""
        self._spent_s += seconds
        if self._spent_s > ALL_S and self.free:
            self._rest()

    def later(self, work: Callable[[], object]) -> None:
        """Queue a call, for this turn of the event loop or a later one."""
        self._waiting.append(work)
        if self.free:
            self._rest()

    def charge(self, client: str, seconds: float) -> None:
        """Count work for a body of this client that has just ended."""
        if client:
            self._shares.spent(client, seconds, time.perf_counter())

    def exceeds_share(self, client: str) -> bool:
        """True if the further work for large bodies of this client belongs outside of the loop."""
        return self._shares.is_used_up(client, time.perf_counter())

    async def take(self, work: Callable[[], T], client: str = "") -> T:
        """Call `work` now if there is time left in this turn, else later. Returns or raises its result."""
        if self.free:
            begin = time.perf_counter()
            try:
                return self._charged(work, client)
            finally:
                self.spent(time.perf_counter() - begin)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.later(partial(_settle, [done], partial(self._charged, work, client)))
        try:
            return await done
        finally:
            del done  # breaks a cycle: its error refers to this frame

    async def outside(self, work: Callable[[], T], client: str) -> T:
        """Call `work`, which releases the GIL most of the time, in a thread: one call at a time, of clients in turn. Returns or
        raises its result.
        """
        own = self._locks.get(client)
        if own is None:
            own = self._locks[client] = asyncio.Lock()
        async with own, self._one:
            return await asyncio.to_thread(work)

    def _charged(self, work: Callable[[], T], client: str) -> T:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.charge(client, time.perf_counter() - begin)

    def _rest(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)
        self.free = False

    def _turn(self) -> None:
        begin = time.perf_counter()
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.perf_counter() - begin > ALL_S:
                    break
        finally:
            if self._waiting or (spent_s := time.perf_counter() - begin) > ALL_S:
                asyncio.get_running_loop().call_soon(self._turn)
            else:
                self._spent_s, self.free = spent_s, True

    def __repr__(self) -> str:
        return f"<Turns, {len(self._waiting)} wait>"


def _settle(waiter: list[asyncio.Future[T]], work: Callable[[], T]) -> None:
    """waiter: a list with one future, which is removed: an error refers to this frame, so the frame must not refer to the
    future.
    """
    if waiter[0].done():  # cancelled
        return
    try:
        made = work()
    except Exception as error:  # noqa: BLE001  # passed to the waiter
        waiter.pop().set_exception(error)
    else:
        waiter.pop().set_result(made)


_TURNS: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]()


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns:
    """The queue shared by all connections of this event loop."""
    turns = _TURNS.get(loop)
    if turns is None:
        turns = _TURNS[loop] = Turns()
    return turns


def first_turn(data: bytes) -> int:
    """Number of leading bytes to parse now; the rest is for the next turn. O(bytes)."""
    size = len(data)
    if size <= AT_ONCE or _line_ends(data, 0, size) <= _LINES:
        return size
    return _part(data, 0)


def _part(data: bytes, at: int) -> int:
    """Number of bytes from offset `at` on to parse at once, by the density of line ends there."""
    size = min(LARGE, len(data) - at)
    if size <= AT_ONCE // 4 or (lines := _line_ends(data, at, at + size)) <= _LINES:
        return size
    return min(size, max(AT_ONCE // 4, size * _LINES // lines))


def _line_ends(data: bytes, begin: int, end: int) -> int:
    return data.count(b"\n", begin, end) + data.count(b"\r", begin, end)


class DeferredData:
    """Received data of a connection that is deferred to later turns, in parts.

    size: bytes to be parsed. held: bytes in memory; a piece is kept until all of it is parsed.
    """

    __slots__ = ("_at", "_data", "_due", "_more", "_turns", "size")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._data = b""
        self._at = 0  # bytes of it already parsed
        self._more = bytearray()  # data after _data; one buffer, because it may arrive byte by byte
        self._due = False
        self.size = 0

    @property
    def held(self) -> int:
        return len(self._data) + len(self._more)

    def first(self, data: bytes) -> bytes:
        """Without deferred data: returns the part of `data` to parse now, and defers the rest. While `Turns` is not free, all
        of it is deferred unless it is SMALL.
        """
        free = self._turns.free or len(data) <= SMALL
        now = first_turn(data) if free else 0
        self._turns.spent(min(now, AT_ONCE) * BYTE_S)
        if now == len(data):
            return data
        self._data, self._at, self.size = data, now, len(data) - now
        return data[:now]

    def add(self, data: bytes) -> None:
        """Defer further data."""
        self._more += data
        self.size += len(data)

    def turn(self) -> Iterator[bytes]:
        """The next parts, until their parsing has taken `TURN_S`."""
        end = time.perf_counter() + TURN_S
        while self.size:
            if self._at == len(self._data):
                self._data, self._at, self._more = bytes(self._more), 0, bytearray()
            begin = self._at
            self._at += _part(self._data, begin)
            part = self._data[begin : self._at]
            self.size -= len(part)
            if not self.size:
                self._data, self._at = b"", 0
            yield part
            if time.perf_counter() > end:
                return

    def schedule(self, turn: Callable[[], None]) -> None:
        """Queue a call of `turn`, which must call `due` first."""
        if not self._due:
            self._due = True
            self._turns.later(turn)

    def waits(self) -> bool:
        return self.size > 0

    def due(self) -> None:
        """The scheduled turn has started."""
        self._due = False

    def clear(self) -> None:
        self._data, self._at, self._more, self.size = b"", 0, bytearray(), 0

    def __repr__(self) -> str:
        return f"<Late {self.size} bytes>"
