"""Who may go to a pool's replicas now, who waits, who is refused.

    try_admit / wait ──► a place is free ───────────────────────────► Permit ── release ──► the place goes to the next in line
                    └──► none ──► in line ── its turn comes ──────────►┘
                             └──► the line is full, `queue_s` is over, or its place in line is needed ──► 429, Retry-After

A pool has `max_inflight` places and a line of `max_queue`. As long as anybody waits, every place is taken; so whoever finds a
place free overtakes nobody, and the usual request costs one comparison. A place that is given back goes straight to the next
in line, never through the open. A `Permit` is given back once, in a `finally`; further times count for nothing.

In line (`Line`: pure, and synchronous) the higher priority goes first. Within one priority the tenants take turns, and within
one tenant it is first come, first served: who sends a thousand requests delays his own. When the line is full, the newest
request of the lowest priority, of the tenant who has the most in line there, gives way to one of a higher priority, and to one
of the same priority whose tenant has at least two fewer in line; else one tenant's thousand would lock all others out.

A request that waits hears what became of it through a future. Its client may leave at any time: then it leaves the line, or,
if it had just been handed a place and could not use it, hands that on.

Retry-After tells how long the line that is now will need, from how fast places came free lately while all were taken.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import GatewayError, bad_request

MAX_PRIORITY = 100
RETRY_S = 1, 60  # the least and the most that Retry-After says

QUEUE_FULL, DISPLACED, QUEUE_TIMEOUT = "queue_full", "displaced", "queue_timeout"
REASONS = (QUEUE_FULL, DISPLACED, QUEUE_TIMEOUT)

_WHOLE = re.compile(r"[-+]?[0-9]{1,3}", re.ASCII)
_REMEMBERED = 64  # releases that the pace remembers, about

T = TypeVar("T")


def priority_of(header: str | None) -> int:
    """What a request's priority header says: -100 to 100, higher goes first; 0 without one."""
    if header is None:
        return 0
    text = header.strip()
    if not _WHOLE.fullmatch(text) or abs(int(text)) > MAX_PRIORITY:
        wanted = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}; higher goes first"
        raise bad_request(f"The priority {header[:40]!r} is not {wanted}.", param="priority", code="invalid_priority")
    return int(text)


# -- the line


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One request in line. told: how it hears what became of it; no business of the line."""

    tenant: str
    priority: int
    told: T


class Line(Generic[T]):
    """Who waits, and whose turn it is. All operations are O(1) but for `last` and `gives_way`, which are O(tenants in line)."""

    def __init__(self) -> None:
        # priority -> tenant (the one whose turn it is first) -> its places, the oldest first; no part is ever empty
        self._levels: dict[int, OrderedDict[str, OrderedDict[Place[T], None]]] = {}
        self._priorities: list[int] = []  # of the levels, rising
        self._size = 0

    def add(self, place: Place[T]) -> None:
        """At the end of its tenant's; a tenant who has none in line at this priority takes his turn after the others."""
        level = self._levels.get(place.priority)
        if level is None:
            level = self._levels[place.priority] = OrderedDict()
            bisect.insort(self._priorities, place.priority)
        level.setdefault(place.tenant, OrderedDict())[place] = None
        self._size += 1

    def first(self) -> Place[T] | None:
        """Whose turn it is."""
        if not self._priorities:
            return None
        level = self._levels[self._priorities[-1]]
        return next(iter(level[next(iter(level))]))

    def serve(self, place: Place[T]) -> None:
        """It has had its turn: its tenant's next one is after all other tenants'."""
        self.remove(place)
        level = self._levels.get(place.priority)
        if level is not None and place.tenant in level:
            level.move_to_end(place.tenant)

    def remove(self, place: Place[T]) -> bool:
        """It leaves; its tenant keeps his turn if he has others in line. False if it is not in line."""
        level = self._levels.get(place.priority, OrderedDict())
        places = level.get(place.tenant)
        if places is None or place not in places:
            return False
        self._size -= 1
        del places[place]
        if not places:
            del level[place.tenant]
        if not level:
            del self._levels[place.priority]
            self._priorities.remove(place.priority)
        return True

    def last(self) -> Place[T] | None:
        """Who is sent away when there are too many: at the lowest priority, of the tenant with the most there, the newest.

        Of several such tenants the one whose turn comes last.
        """
        if not self._priorities:
            return None
        level = self._levels[self._priorities[0]]
        most = max(map(len, level.values()))
        return next(next(reversed(places)) for places in reversed(level.values()) if len(places) == most)

    def gives_way(self, tenant: str, priority: int) -> Place[T] | None:
        """Who leaves a full line for this newcomer. None: nobody does."""
        last = self.last()
        if last is None or last.priority > priority:
            return None
        if last.priority == priority:
            level = self._levels[priority]
            if len(level[last.tenant]) - len(level.get(tenant, ())) < 2:
                return None
        return last

    def __len__(self) -> int:
        return self._size

    def check(self) -> None:
        """Assert that everyone stands where it belongs. O(n)."""
        assert self._priorities == sorted(self._levels)
        size = 0
        for priority, level in self._levels.items():
            assert level
            for tenant, places in level.items():
                assert places
                assert all(place.tenant == tenant and place.priority == priority for place in places)
                size += len(places)
        assert size == self._size

    def __repr__(self) -> str:
        levels = (
            f"{priority}: " + ", ".join(f"{tenant} {len(places)}" for tenant, places in self._levels[priority].items())
            for priority in reversed(self._priorities)
        )
        return f"<Line {'; '.join(levels) or 'empty'}>"


class Pace:
    """How fast places come free while all are taken; what happens in easier times tells nothing of that.

    It begins as the belief of one place a second, which is worth one release.
    """

    __slots__ = ("_releases", "_seconds", "_since")

    def __init__(self) -> None:
        self._releases = 1.0
        self._seconds = 1.0
        self._since = 0.0

    def full(self, now: float) -> None:
        """From now on all places are taken."""
        self._since = now

    def released(self, now: float) -> None:
        """One of them came free."""
        if self._releases >= _REMEMBERED:
            self._releases /= 2
            self._seconds /= 2
        self._releases += 1
        self._seconds += now - self._since
        self._since = now

    def seconds(self, places: int, now: float) -> float:
        """How long it takes until so many places come free, all being taken now."""
        return places * (self._seconds + now - self._since) / self._releases

    def __repr__(self) -> str:
        return f"<Pace {self._releases / self._seconds:.3g}/s>"


# -- in the event loop


class Permit:
    """One place of a pool. `release` it in one `finally`; again is harmless."""

    __slots__ = ("_pool",)

    def __init__(self, pool: Admission) -> None:
        self._pool: Admission | None = pool

    def release(self) -> None:
        pool = self._pool
        if pool is not None:
            self._pool = None
            pool._released()

    def __repr__(self) -> str:
        return "<Permit released>" if self._pool is None else "<Permit>"


_Waiter = Place[asyncio.Future[Permit | GatewayError]]


class Admission:
    """See the top of this file. inflight: places taken. refused: how many so far, by reason."""

    def __init__(
        self, *, max_inflight: int, max_queue: int, queue_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inflight = 0
        self.refused = dict.fromkeys(REASONS, 0)
        self._max_inflight, self._max_queue, self._queue_s = max_inflight, max_queue, queue_s
        self._clock = clock
        self._line: Line[asyncio.Future[Permit | GatewayError]] = Line()
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def try_admit(self) -> Permit | None:
        """A place, if one is free. None: `wait` for it. O(1)."""
        if self.inflight >= self._max_inflight:
            return None
        self.inflight += 1
        if self.inflight == self._max_inflight:
            self._pace.full(self._clock())
        return Permit(self)

    async def wait(self, tenant: str, priority: int) -> Permit:
        """A place, at once or when its turn comes. Raises the GatewayError 429 that says why not."""
        permit = self.try_admit()
        if permit is not None:
            return permit
        loop = asyncio.get_running_loop()
        place: _Waiter = Place(tenant, priority, loop.create_future())
        self._enter(place)
        timer = loop.call_later(self._queue_s, self._turn_out, place, QUEUE_TIMEOUT)
        answer = None
        try:
            answer = await place.told
        finally:
            timer.cancel()
            if answer is None:
                self._left(place)
        if isinstance(answer, GatewayError):
            raise answer
        return answer

    def resize(self, *, max_inflight: int, max_queue: int, queue_s: float) -> None:
        """New bounds. Who runs goes on, who no longer fits in line is refused; queue_s is for those who come from now on."""
        was_full = self.inflight >= self._max_inflight
        self._max_inflight, self._max_queue, self._queue_s = max_inflight, max_queue, queue_s
        self._hand_out()
        if self.inflight >= max_inflight and not was_full:
            self._pace.full(self._clock())
        while len(self._line) > max_queue and (last := self._line.last()):
            self._turn_out(last, DISPLACED)

    def _enter(self, place: _Waiter) -> None:
        if len(self._line) >= self._max_queue:
            last = self._line.gives_way(place.tenant, place.priority)
            if last is None:
                raise self._refusal(QUEUE_FULL)
            self._turn_out(last, DISPLACED)
        self._line.add(place)

    def _turn_out(self, place: _Waiter, reason: str) -> None:
        """Refuse one that is in line, unless it has just left or been served."""
        if self._line.remove(place) and not place.told.done():
            place.told.set_result(self._refusal(reason))

    def _left(self, place: _Waiter) -> None:
        """Its client is gone. If it was handed a place meanwhile, nobody is there to use it."""
        if not self._line.remove(place) and place.told.done() and not place.told.cancelled():
            answer = place.told.result()
            if isinstance(answer, Permit):
                answer.release()

    def _released(self) -> None:
        if self.inflight >= self._max_inflight:
            self._pace.released(self._clock())
        self.inflight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the free places to those in line."""
        while self.inflight < self._max_inflight and (place := self._line.first()):
            if place.told.done():  # cancelled in this very tick: it takes no turn
                self._line.remove(place)
                continue
            self._line.serve(place)
            self.inflight += 1
            place.told.set_result(Permit(self))

    def _refusal(self, reason: str) -> GatewayError:
        self.refused[reason] += 1
        least, most = RETRY_S
        seconds = math.ceil(min(most, max(least, self._pace.seconds(len(self._line) + 1, self._clock()))))
        state = f"{self.inflight} running, {len(self._line)} waiting"
        if reason == QUEUE_TIMEOUT:
            what, code = f"The request has waited too long for a replica ({state})", "queue_timeout"
        else:
            what, code = f"The replicas are overloaded ({state})", "overloaded"
        return GatewayError(429, code, f"{what}. Retry after {seconds} s.", retry_after_s=seconds)

    def check(self) -> None:
        """Assert that no place is idle while somebody waits, and that the line is within its bound."""
        self._line.check()
        assert self.inflight >= 0
        assert len(self._line) <= self._max_queue
        assert not self._line or self.inflight >= self._max_inflight

    def __repr__(self) -> str:
        return f"<Admission {self.inflight}/{self._max_inflight} running, {self.waiting}/{self._max_queue} waiting>"
