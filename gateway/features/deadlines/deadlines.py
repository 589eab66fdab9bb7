"""Deadlines: a request ends with 504 when the time that its client allows is over, or at once if that is foreseen.

    prepare: the time runs from the request's arrival ──► entering: the queue is too long ──► 504
                                                     ──► chosen: the first token is expected too late ──► 504
                                                     ──► the time is over, in any phase ──► 504, or an error event

The end of the time cancels the request's task, as its client would by leaving: the replica stops too. A deadline is for one
client: an answer whose client has left has none, and a request that adopts it (feature `adoption`) has its own.

The estimates are the router's, for the first token only. They are wrong by chance, so a request is refused only if they are
SURE times too long, and where the prefill rate of the pool is measured.

Requests of the gateway itself (background runs, steps of workflows) have no deadline: their clients may have left. Nor have
sessions (a WebSocket to a replica).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from gateway.admission.pool_queue import QUEUE_TIMEOUT
from gateway.errors import DEADLINE, GatewayError
from gateway.features.deadlines.headers import LONGEST_S, QUEUE_HEADER, TIMEOUT_HEADER, has_times, queue_time_of, timeout_of
from gateway.features.deadlines.metrics import DeadlineMetrics
from gateway.request.client import InternalRequest
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot

SURE: Final = 1.5  # times the allowed time: a longer estimate is believed
FORESEEN, QUEUED, RUNNING = "foreseen", "queued", "running"
REASONS: Final = (FORESEEN, QUEUED, RUNNING)


class Deadline:
    """The deadline of one request. at: reading of the clock. seconds: as allowed. timers: end the request."""

    __slots__ = ("at", "queue_timer", "seconds", "timer")

    def __init__(self) -> None:
        self.at = float("inf")
        self.seconds = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.queue_timer: asyncio.TimerHandle | None = None

    def leave_queue(self) -> None:
        """The wait in the queue is over. Idempotent."""
        if self.queue_timer is not None:
            self.queue_timer.cancel()
            self.queue_timer = None

    def end(self) -> None:
        """The request is over. Idempotent."""
        self.leave_queue()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def __repr__(self) -> str:
        return f"<Deadline {self.seconds:g} s, at {self.at:.3f}>"


DEADLINE_OF: Final = Slot[Deadline]("deadlines")


class Deadlines:
    """The deadlines of one process (see the module). clock: monotonic seconds. use: adds the phases `entering`, `chosen` and
    `settled` for the first request with a deadline.
    """

    def __init__(self, metrics: DeadlineMetrics, clock: Callable[[], float], use: Callable[[], None]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._use = use
        self._used = False
        for reason in REASONS:
            metrics.exceeded.add((reason,), 0)

    def concerns(self, exchange: Exchange) -> bool:
        """True if the client has sent one of the headers, with a request that is no session."""
        request = exchange.request
        return bool(request.derived(has_times)) and not (request.upgrades or isinstance(request, InternalRequest))

    async def prepare(self, exchange: Exchange) -> None:
        """Begin to count. Raises GatewayError 400 for an invalid time."""
        headers, task = exchange.request.headers, asyncio.current_task()
        assert task is not None
        deadline = Deadline()
        spent_s = self._clock() - exchange.record.begun
        if (header := headers.get(TIMEOUT_HEADER)) is not None:
            deadline.seconds = timeout_of(header)
            deadline.at = exchange.record.begun + deadline.seconds
            deadline.timer = _after(deadline.seconds - spent_s, self._expire, exchange, deadline, task)
        queue_s = queue_time_of(headers.get(QUEUE_HEADER) or "")
        if queue_s is not None and queue_s <= LONGEST_S:
            deadline.queue_timer = _after(queue_s - spent_s, self._leave_queue, exchange, task)
        DEADLINE_OF.set(exchange.record, deadline)
        if not self._used:
            self._used = True
            self._use()

    def entering(self, exchange: Exchange) -> None:
        """Raises GatewayError 504 if the queue of the pool is surely too long."""
        deadline = None if exchange.record.answer.own else DEADLINE_OF.get(exchange.record)
        if deadline is not None and deadline.timer is not None and (wait_s := exchange.target.admission.expected_s) is not None:
            self._require_time(deadline, wait_s, "a slot at a replica")

    def chosen(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """Raises GatewayError 504 if the first token is surely expected too late."""
        deadline = DEADLINE_OF.get(exchange.record)
        if deadline is None:
            return
        deadline.leave_queue()
        lease = exchange.booking.lease
        if deadline.timer is not None and exchange.record.subject.metered and lease.load.rate.pool.known:
            self._require_time(deadline, exchange.booking.chosen.cost.first_token_s, "its first token")

    def settled(self, record: SettledRequest) -> None:
        """The request is over."""
        deadline = DEADLINE_OF.get(record)
        if deadline is not None:
            deadline.end()

    def _require_time(self, deadline: Deadline, wait_s: float, what: str) -> None:
        left_s = deadline.at - self._clock()
        if wait_s <= SURE * max(0.0, left_s):
            return
        deadline.end()
        self._metrics.exceeded.add((FORESEEN,))
        text = f"{_allows(deadline)}: {what} is expected after about {wait_s:.0f} s, and {max(0.0, left_s):.1f} s are left"
        raise GatewayError(504, DEADLINE, f"{text}. Allow more time, or send less.")

    def _expire(self, exchange: Exchange, deadline: Deadline, task: asyncio.Task[object]) -> None:
        """The time is over."""
        deadline.timer = None
        if not exchange.request.attended:
            return
        queued = exchange.place is not None
        self._metrics.exceeded.add((QUEUED if queued else RUNNING,))
        where = "it still waited for a replica" if queued else "its answer is not complete"
        _end(exchange, GatewayError(504, DEADLINE, f"{_allows(deadline)}: {where}. Allow more time, or send less."), task)

    def _leave_queue(self, exchange: Exchange, task: asyncio.Task[object]) -> None:
        """The time in the queue is over."""
        if exchange.place is not None and not exchange.place.hurry():
            text = f"The request has waited for a replica for longer than {QUEUE_HEADER} allows. Retry."
            _end(exchange, GatewayError(429, QUEUE_TIMEOUT, text, retry_after_s=1), task)

    def __repr__(self) -> str:
        return f"<Deadlines {self._metrics.exceeded!r}>"


def _after(seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(max(0.0, seconds), call, *arguments)


def _end(exchange: Exchange, error: GatewayError, task: asyncio.Task[object]) -> None:
    exchange.ended_by = error
    task.cancel()


def _allows(deadline: Deadline) -> str:
    return f"The request cannot be answered in the {deadline.seconds:g} s that {TIMEOUT_HEADER} allows"
