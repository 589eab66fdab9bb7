"""How much of what has arrived is read in one turn of the event loop.

A read brings up to 256 KiB, and most of it costs next to nothing: it is passed on as it is. But each line end may be the end of
a chunk, a header or an event, which is work by itself: whoever sends little else could hold the event loop for a second. The
same goes for many connections at once, of which each brings little: so `Turns` bounds what all of them together take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

AT_ONCE: Final = 4096  # bytes: so many are always read at once, whatever they are
SMALL: Final = 512  # bytes: so many are read at once even while others wait, for a probe or a scrape is no more
BYTE_S: Final = 0.0000003  # what a byte costs at most, if it is read at once: tiny chunks
LARGE: Final = 32 << 10  # bytes: after such a read of a replica's answer, the next one is in another turn
TURN_S: Final = 0.0005  # for one connection: what is late there, or what its client knows of a stream that broke off
ALL_S: Final = 0.004  # in one turn of the event loop for the work of all connections that goes by `Turns`
_LINES: Final = 256  # line ends in one part, where they are evenly spread

T = TypeVar("T")


class Turns:
    """Work that may take long, of all connections of one event loop: no more of it is begun in a turn of the loop once it has
    taken ALL_S there; the rest waits for the next turns, first come first served. What is under way is not interrupted.
    """

    __slots__ = ("_spent_s", "_waiting", "free")

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], object]]()
        self._spent_s = 0.0  # since it last was too much, perhaps in several turns
        self.free = True  # work may be done at once; whoever does it tells by `spent` what it took

    def spent(self, seconds: float) -> None:
        """Work was done at once, and took so long."""
        self._spent_s += seconds
        if self._spent_s > ALL_S and self.free:
            self._rest()

    def later(self, work: Callable[[], object]) -> None:
        """Call it when it is its turn: behind all that wait, in this turn of the event loop or in a later one."""
        self._waiting.append(work)
        if self.free:
            self._rest()

    async def take(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, which is called now if there is time left in this turn, else later."""
        if self.free:
            begin = time.perf_counter()
            try:
                return work()
            finally:
                self.spent(time.perf_counter() - begin)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.later(partial(_settle, [done], work))
        try:
            return await done
        finally:
            del done  # an error that it holds refers to this frame

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
    """waiter: one, who is taken out of it: an error refers to this frame, which must not refer to who holds the error."""
    if waiter[0].done():  # it has left
        return
    try:
        made = work()
    except Exception as error:  # noqa: BLE001  # it is for who waits
        waiter.pop().set_exception(error)
    else:
        waiter.pop().set_result(made)


_TURNS: Final = WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]()


def turns_of(loop: asyncio.AbstractEventLoop) -> Turns:
    """The one that all connections of this event loop share."""
    turns = _TURNS.get(loop)
    if turns is None:
        turns = _TURNS[loop] = Turns()
    return turns


def first_turn(data: bytes) -> int:
    """How many of these bytes to read now; the rest is to wait for the next turn. O(bytes)."""
    size = len(data)
    if size <= AT_ONCE or _line_ends(data, 0, size) <= _LINES:
        return size
    return _part(data, 0)


def _part(data: bytes, at: int) -> int:
    """How many of the bytes from there on to read at once: by those that come next, for lines may be dense in one place."""
    size = min(LARGE, len(data) - at)
    if size <= AT_ONCE // 4 or (lines := _line_ends(data, at, at + size)) <= _LINES:
        return size
    return min(size, max(AT_ONCE // 4, size * _LINES // lines))


def _line_ends(data: bytes, begin: int, end: int) -> int:
    return data.count(b"\n", begin, end) + data.count(b"\r", begin, end)


class Late:
    """What has arrived on a connection and is to be read in later turns, in parts.

    size: bytes that are to be read. held: bytes in memory; what was read of one piece is there until all of it was.
    """

    __slots__ = ("_at", "_data", "_due", "_more", "_turns", "size")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._data = b""
        self._at = 0  # what of it was read
        self._more = bytearray()  # what comes behind _data: in one piece, for it may come byte by byte
        self._due = False
        self.size = 0

    @property
    def held(self) -> int:
        return len(self._data) + len(self._more)

    def first(self, data: bytes) -> bytes:
        """While nothing is late: what of this to read now; the rest is late. While `Turns` are not free, all of it is, but for
        what is SMALL.
        """
        free = self._turns.free or len(data) <= SMALL
        now = first_turn(data) if free else 0
        self._turns.spent(min(now, AT_ONCE) * BYTE_S)
        if now == len(data):
            return data
        self._data, self._at, self.size = data, now, len(data) - now
        return data[:now]

    def add(self, data: bytes) -> None:
        """This is late as well."""
        self._more += data
        self.size += len(data)

    def turn(self) -> Iterator[bytes]:
        """The next parts, until they have taken `TURN_S`."""
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
        """Call it when it is its turn; it is to call `due` first."""
        if not self._due:
            self._due = True
            self._turns.later(turn)

    def waits(self) -> bool:
        return self.size > 0

    def due(self) -> None:
        """The turn has come."""
        self._due = False

    def clear(self) -> None:
        self._data, self._at, self._more, self.size = b"", 0, bytearray(), 0

    def __repr__(self) -> str:
        return f"<Late {self.size} bytes>"
