"""Who may go to a pool's replicas now, who waits, who is refused.

    try_admit / wait ──► a place is free ───────────────────────────► Permit ── release ──► the place goes to the next in line
                    └──► none ──► in line ── its turn comes ──────────►┘
                             └──► the line is full, `queue_s` is over, or its place in line is needed ──► 429, Retry-After

A pool has `max_inflight` places and a line of `max_queue`. As long as anybody waits, every place is taken; so whoever finds a
place free overtakes nobody, and the usual request costs one comparison. A place that is given back goes straight to the next
in line (`fair_queue.py`), never in between. A `Permit` is given back once, in a `finally`; further times count for nothing.

A request that waits hears what became of it through a future. Its client may leave at any time: then it leaves the line, or,
if it had just been handed a place and could not use it, hands that on.

Retry-After tells how long the line that is now will need, from how fast places came free lately while all were taken.

Where several processes share a pool, each has a line of its own, and hears a moment later how many places the others have
taken (`others`): for that moment the bound may be overstepped by what was taken at the same time.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable

from gateway.admission.fair_queue import Line, Pace, Place
from gateway.errors import GatewayError, bad_request

MAX_PRIORITY = 100
RETRY_S = 1, 60  # the least and the most that Retry-After says

QUEUE_FULL, DISPLACED, QUEUE_TIMEOUT = "queue_full", "displaced", "queue_timeout"
REASONS = (QUEUE_FULL, DISPLACED, QUEUE_TIMEOUT)

_WHOLE = re.compile(r"[-+]?[0-9]{1,3}", re.ASCII)


def priority_of(header: str | None) -> int:
    """What a request's priority header says: -100 to 100, higher goes first; 0 without one."""
    if header is None:
        return 0
    text = header.strip()
    if not _WHOLE.fullmatch(text) or abs(int(text)) > MAX_PRIORITY:
        wanted = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}; higher goes first"
        raise bad_request(f"The priority {header[:40]!r} is not {wanted}.", param="priority", code="invalid_priority")
    return int(text)


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
        self._elsewhere = 0  # places that other processes have taken
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
        taken = self.inflight + self._elsewhere
        if taken >= self._max_inflight:
            return None
        self.inflight += 1
        if taken + 1 == self._max_inflight:
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
            raise answer.again()
        return answer

    def resize(self, *, max_inflight: int, max_queue: int, queue_s: float) -> None:
        """New bounds. Who runs goes on, who no longer fits in line is refused; queue_s is for those who come from now on."""
        was_full = self._full
        self._max_inflight, self._max_queue, self._queue_s = max_inflight, max_queue, queue_s
        self._hand_out()
        if self._full and not was_full:
            self._pace.full(self._clock())
        while len(self._line) > max_queue and (last := self._line.last()):
            self._turn_out(last, DISPLACED)

    def others(self, taken: int) -> None:
        """So many places are taken by other processes now."""
        was_full = self._full
        if was_full and taken < self._elsewhere:
            self._pace.released(self._clock())
        self._elsewhere = taken
        self._hand_out()
        if self._full and not was_full:
            self._pace.full(self._clock())

    @property
    def _full(self) -> bool:
        return self.inflight + self._elsewhere >= self._max_inflight

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
        if self._full:
            self._pace.released(self._clock())
        self.inflight -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the free places to those in line."""
        while not self._full and (place := self._line.first()):
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
        state = f"{self.inflight + self._elsewhere} running, {len(self._line)} waiting"
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
        assert not self._line or self._full

    def __repr__(self) -> str:
        return f"<Admission {self.inflight}/{self._max_inflight} running, {self.waiting}/{self._max_queue} waiting>"
