"""Admission of requests to a pool: a bound on requests at its replicas, and a bounded queue before it.

    try_admit / wait ──► free slot ───────────────────────────► Permit ── release ──► the slot goes to the next waiter
                    └──► none ──► queued ── next waiter ───────►┘
                             └──► queue full, or its time over, or surely not enough ──► 429, Retry-After

A pool has `max_inflight` slots and a queue of `max_queue`. While there are waiters, all slots are taken; so a request that
finds a free slot overtakes nobody, and most requests cost one comparison. A released slot goes directly to the next waiter
(`fair_queue.py`). A `Permit` is released in a `finally`; `release` is idempotent.

A waiter gets its outcome through a future. If its client disconnects, it leaves the queue, or releases the slot that it has
just received.

A request may wait QUEUE_S. A stream whose client gets signs of life may wait STREAM_QUEUE_S: a client that returns is the last
in the queue again, so it should rather wait. The shortest patience of an agent is 300 s (docs/agents.md), and the prefill
follows. Where another pool would serve the request, nobody waits for longer than QUEUE_S (`fleet/pools.py`).

Retry-After is the expected waiting time of the queue's first request, from the latest rate at which slots came free: a client
that returns should do so as soon as the queue moves. At most 60 s, because official clients ignore a longer one, and return
within seconds.

Before that bound is reached there may be no free *place*: all engines run as many requests as they can (`PlaceGate`). Then
requests wait here, too, in the same order, but nobody is refused: a request is sent when its time is over, or when the queue is
full, and waits on in its engine's queue. A request takes as many places as it has sequences, and goes as soon as one is free:
the rest of it waits in the engine.

Within a tenant the oldest request goes first, less its work: where engines compute one prompt at a time, the shortest goes
first, with the ageing of the lines behind this queue (`router/late.py`). Work counts up to AGEING * `queue_s` / 2, so requests
that are older by more than half of `queue_s` are not overtaken. A request overtakes none if it comes while all slots are taken:
requests are refused then when their time is over.

Processes that share a pool have a queue each, and learn with a delay how many slots the others use (`set_remote_inflight`). The
bound may be exceeded by the requests admitted concurrently during that delay.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable

from gateway.admission.fair_queue import FairQueue, ReleaseRate, Waiter
from gateway.errors import GatewayError, bad_request
from router.load import AGEING
from router.native import mypyc_attr

MAX_PRIORITY = 100
QUEUE_S, STREAM_QUEUE_S = 30.0, 240.0
RETRY_S = 1, 60  # bounds of Retry-After
MAX_PLACE = 100  # in the queue; a place behind it is not counted

QUEUE_FULL, QUEUE_TIMEOUT = "queue_full", "queue_timeout"
REASONS = (QUEUE_FULL, QUEUE_TIMEOUT)
OVERLOADED = "overloaded"  # the code of a refusal for a full queue; for the other reason it is its name

_WHOLE = re.compile(r"[-+]?[0-9]{1,3}", re.ASCII)


def priority_of(header: str | None) -> int:
    """The value of a request's priority header: -100 to 100, higher values are served first; 0 without one. Raises GatewayError
    400.
    """
    if header is None:
        return 0
    text = header.strip()
    if not _WHOLE.fullmatch(text) or abs(int(text)) > MAX_PRIORITY:
        wanted = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}; higher goes first"
        message = f"The priority {header[:40]!r} (X-Priority) is not {wanted}."
        raise bad_request(message, param="priority", code="invalid_priority")
    return int(text)


def granted_priority(header: str | None, most: int | None) -> int:
    """The priority of a request. header: the client's. most: its maximum, and its value without a header; None: no maximum.
    Raises GatewayError 400.
    """
    wanted = priority_of(header)
    if most is None:
        return wanted
    return most if header is None else min(wanted, most)


@mypyc_attr(allow_interpreted_subclasses=True)
class PlaceGate:
    """Says if a replica of the pool has a free place (`fleet/places.py`). total: places of all replicas: while fewer sequences
    are there, one is free.
    """

    total: int

    def free(self, granted: int) -> bool:
        """True if there are more free places than `granted`, the sequences of requests about to be booked."""
        raise NotImplementedError

    def crowds(self) -> None:
        """A request waits for a place, and none did before."""
        raise NotImplementedError


class Permit:
    """One slot of a pool, and the places of so many sequences. `release` it in one `finally`; idempotent."""

    __slots__ = ("_pool", "_sequences")

    def __init__(self, pool: Admission, sequences: int) -> None:
        self._pool: Admission | None = pool
        self._sequences = sequences

    def release(self) -> None:
        pool = self._pool
        if pool is not None:
            self._pool = None
            pool._released(self._sequences)

    def __repr__(self) -> str:
        return "<Permit released>" if self._pool is None else "<Permit>"


_Waiter = Waiter[asyncio.Future[Permit | GatewayError]]


class Place:
    """The place of one request in the queue of a pool, while it waits there."""

    __slots__ = ("_pool", "_until", "_waiter")

    def __init__(self) -> None:
        self._pool: Admission | None = None
        self._waiter: _Waiter | None = None
        self._until = 0.0

    def enter(self, pool: Admission, waiter: _Waiter, until: float) -> None:
        """until: reading of the pool's clock when the wait ends without a slot."""
        self._pool, self._waiter, self._until = pool, waiter, until

    def leave(self) -> None:
        self._pool = self._waiter = None

    def found(self) -> tuple[int, float | None] | None:
        """The place, 1: the next one, 0: beyond MAX_PLACE; and the expected seconds to a slot, None: unknown. None: it does not
        wait. O(MAX_PLACE).
        """
        pool, waiter = self._pool, self._waiter
        return pool.place_of(waiter) if pool is not None and waiter is not None else None

    def hurry(self) -> bool:
        """Send the request now, if only a place is missing. True: it waits no more, or never did."""
        pool, waiter = self._pool, self._waiter
        return pool is None or waiter is None or pool.hurry(waiter)

    def refuse_if_hopeless(self) -> bool:
        """Refuse the request now, with 429, if its slot is expected after the end of its wait. True: it waits no more, or never
        did. O(MAX_PLACE).
        """
        pool, waiter = self._pool, self._waiter
        return pool is None or waiter is None or pool.reject_if_hopeless(waiter, self._until)

    def __repr__(self) -> str:
        return f"<Place {self.found()}>"


class Admission:
    """Admission of requests to a pool (see the module). inflight: taken slots. refused: requests rejected so far, by reason.
    queue_s: a request may wait so long. stream_queue_s: likewise a stream whose client gets signs of life; None: queue_s.
    """

    def __init__(
        self,
        *,
        max_inflight: int,
        max_queue: int,
        queue_s: float,
        stream_queue_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inflight = 0
        self._remote_inflight = 0  # slots taken by other processes
        self.refused = dict.fromkeys(REASONS, 0)
        self._max_inflight, self._max_queue = max_inflight, max_queue
        self.queue_s, self.stream_queue_s = queue_s, queue_s if stream_queue_s is None else stream_queue_s
        self._clock = clock
        self._queue: FairQueue[asyncio.Future[Permit | GatewayError]] = FairQueue()
        self._rate = ReleaseRate()
        self._gate: PlaceGate | None = None
        self._surely_free = max_inflight  # while fewer slots are taken, there is a free place
        self._further = 0  # sequences of the requests that take these slots, beyond one for each
        self._remote_further = 0  # of these, of other processes
        self._granted = 0  # sequences of waiters with a permit that do not go on yet

    @property
    def max_inflight(self) -> int:
        return self._max_inflight

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def taken(self) -> int:
        """Slots taken by all processes."""
        return self.inflight + self._remote_inflight

    def try_admit(self, sequences: int = 1) -> Permit | None:
        """A permit if a slot is free; None: `wait` for one. sequences: of the request. O(1)."""
        taken = self.inflight + self._remote_inflight
        if taken >= self._surely_free and (taken >= self._max_inflight or self._queue.size or not self._has_place()):
            return None
        return self._admit(sequences)

    def _admit(self, sequences: int) -> Permit:
        self.inflight += 1
        if self.inflight + self._remote_inflight == self._max_inflight:
            self._rate.saturated(self._clock())
        if sequences > 1:
            self._widen(sequences - 1)
        return Permit(self, sequences)

    def _widen(self, further: int) -> None:
        """The requests that take slots have so many more sequences."""
        self._further += further
        self._set_surely_free()

    def _has_place(self) -> bool:
        """True if a replica has a free place, or nothing is known of places."""
        gate = self._gate
        return gate is None or self.taken + self._further < gate.total or gate.free(self._granted)

    def set_gate(self, gate: PlaceGate | None) -> None:
        """Set the places of the pool's replicas, or apply their new number. None: unknown."""
        self._gate = gate
        self._set_surely_free()
        self._dispatch()

    def _set_surely_free(self) -> None:
        gate = self._gate
        self._surely_free = self._max_inflight if gate is None else min(self._max_inflight, gate.total - self._further)

    @property
    def crowded(self) -> bool:
        """True if requests wait for a place."""
        return self._queue.size > 0 and not self.full

    async def wait(
        self,
        tenant: str,
        priority: int,
        place: Place | None = None,
        *,
        sequences: int = 1,
        pulsed: bool = False,
        work_s: float = 0.0,
    ) -> Permit:
        """A permit, at once or from the queue. place: shows the request's place meanwhile. sequences: of the request. pulsed:
        its client gets signs of life. work_s: by which it goes later than others. Raises GatewayError 429.
        """
        permit = self.try_admit(sequences)
        if permit is not None:
            return permit
        if len(self._queue) >= self._max_queue:
            if self.full:
                raise self._rejection(QUEUE_FULL)
            return self._admit(sequences)
        loop = asyncio.get_running_loop()
        turn = min(work_s, AGEING * self.queue_s / 2) + AGEING * self._clock()
        waiter: _Waiter = Waiter(tenant, priority, loop.create_future(), sequences, turn)
        if not self._queue.size and not self.full:
            self._rate.saturated(self._clock())
            if self._gate is not None:
                self._gate.crowds()
        self._queue.add(waiter, last=self.full)
        most_s = self.stream_queue_s if pulsed else self.queue_s
        timer = loop.call_later(most_s, self._expire, waiter)
        if place is not None:
            place.enter(self, waiter, self._clock() + most_s)
        answer = None
        try:
            answer = await waiter.result
        finally:
            timer.cancel()
            if place is not None:
                place.leave()
            result = waiter.result
            if result.done() and not result.cancelled() and isinstance(result.result(), Permit):
                self._granted -= sequences
            if answer is None:
                self._abandon(waiter)
        if isinstance(answer, GatewayError):
            raise answer.again()
        return answer

    def place_of(self, waiter: _Waiter) -> tuple[int, float | None]:
        """See Place.found."""
        place = self._queue.place(waiter, MAX_PLACE)
        known = place > 0 and self._rate.known
        return place, self._rate.seconds_to_next(self._clock()) * place if known else None

    def hurry(self, waiter: _Waiter) -> bool:
        """See Place.hurry."""
        if self.full:
            return False
        self._turn_out(waiter, QUEUE_TIMEOUT)
        return True

    def reject_if_hopeless(self, waiter: _Waiter, until: float) -> bool:
        """See Place.refuse_if_hopeless. Until a slot has come free, each is expected to take as long as none has, and 1 s."""
        if not self.full:
            return False  # it is sent at the end of its wait
        now = self._clock()
        place = self._queue.place(waiter, MAX_PLACE) or MAX_PLACE
        if not waiter.result.done() and now + self._rate.seconds_to_next(now) * place <= until:
            return False
        self._reject(waiter, QUEUE_TIMEOUT, "The request would wait too long for a replica")
        return True

    def resize(self, *, max_inflight: int, max_queue: int, queue_s: float, stream_queue_s: float | None = None) -> None:
        """New bounds. Running requests go on, waiters beyond max_queue are rejected; the times apply to later requests."""
        was_full = self.full
        self._max_inflight, self._max_queue = max_inflight, max_queue
        self.queue_s, self.stream_queue_s = queue_s, queue_s if stream_queue_s is None else stream_queue_s
        self.set_gate(self._gate)
        if self.full and not was_full:
            self._rate.saturated(self._clock())
        while len(self._queue) > max_queue and (last := self._queue.last()):
            self._turn_out(last, QUEUE_FULL)

    def set_remote_inflight(self, taken: int, further: int = 0) -> None:
        """taken: slots that other processes have taken. further: sequences of their requests, beyond one for each."""
        was_full = self.full
        if was_full and taken < self._remote_inflight:
            self._rate.released(self._clock())
        self._remote_inflight = taken
        self._widen(further - self._remote_further)
        self._remote_further = further
        self._dispatch()
        if self.full and not was_full:
            self._rate.saturated(self._clock())

    @property
    def expected_s(self) -> float | None:
        """The expected wait of a request that comes now, in seconds. None: it does not wait, or nothing is known."""
        if not (self.full and self._rate.known):
            return None
        return self._rate.seconds_to_next(self._clock()) * (len(self._queue) + 1)

    @property
    def refuses(self) -> bool:
        """True if a request would find neither a slot nor a place in the queue."""
        return self.full and len(self._queue) >= self._max_queue

    @property
    def full(self) -> bool:
        """True if all slots are taken."""
        return self.taken >= self._max_inflight

    def _expire(self, waiter: _Waiter) -> None:
        """The waiter's time is over."""
        self._turn_out(waiter, QUEUE_TIMEOUT)

    def _turn_out(self, waiter: _Waiter, reason: str) -> None:
        """A waiter that may wait no longer: reject it if all slots are taken, else send it to a replica without a free
        place.
        """
        if self.full:
            self._reject(waiter, reason)
        elif self._queue.remove(waiter) and not waiter.result.done():
            self._grant(waiter)

    def _grant(self, waiter: _Waiter) -> None:
        self._granted += waiter.sequences
        waiter.result.set_result(self._admit(waiter.sequences))

    def _reject(self, waiter: _Waiter, reason: str, happened: str = "") -> None:
        """Reject a waiter, unless it has just left or been served."""
        if self._queue.remove(waiter) and not waiter.result.done():
            waiter.result.set_result(self._rejection(reason, happened))

    def _abandon(self, waiter: _Waiter) -> None:
        """Handle a disconnected client: leave the queue, or release the slot received meanwhile."""
        if not self._queue.remove(waiter) and waiter.result.done() and not waiter.result.cancelled():
            answer = waiter.result.result()
            if isinstance(answer, Permit):
                answer.release()

    def _released(self, sequences: int) -> None:
        if self.full or self._queue.size:
            self._rate.released(self._clock())
        self.inflight -= 1
        if sequences > 1:
            self._widen(1 - sequences)
        if self._queue.size:
            self._dispatch()

    def _dispatch(self) -> None:
        """Give free slots to waiters, while there are free places."""
        while self._queue.size and not self.full and self._has_place() and (waiter := self._queue.first()):
            if waiter.result.done():  # cancelled in this turn of the loop: keeps its tenant's turn
                self._queue.remove(waiter)
                continue
            self._queue.served(waiter)
            self._grant(waiter)

    def _rejection(self, reason: str, happened: str = "") -> GatewayError:
        """happened: default: as the reason says."""
        self.refused[reason] += 1
        least, most = RETRY_S
        seconds = math.ceil(min(most, max(least, self._rate.seconds_to_next(self._clock()))))
        state = f"{self.taken} running, {len(self._queue)} waiting"
        if reason == QUEUE_TIMEOUT:
            what, code = happened or "The request has waited too long for a replica", QUEUE_TIMEOUT
        else:
            what, code = "The replicas are overloaded", OVERLOADED
        return GatewayError(429, code, f"{what} ({state}). Retry after {seconds} s.", retry_after_s=seconds)

    def check(self) -> None:
        """Raises AssertionError if a slot and a place are free while there are waiters, or the queue exceeds its bound."""
        self._queue.check()
        assert self.inflight >= 0
        assert self._granted >= 0
        assert self._further >= self._remote_further >= 0
        assert len(self._queue) <= self._max_queue
        assert not self._queue or self.full or not self._has_place()

    def __repr__(self) -> str:
        return f"<Admission {self.inflight}/{self._max_inflight} running, {self.waiting}/{self._max_queue} waiting>"
