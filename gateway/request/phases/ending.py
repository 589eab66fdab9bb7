"""The end of a request: its record is completed, its resources are released, and the observers get the record.

Attempts and delivery keep their results in logs of their own (`exchange.py`), which are copied into the record here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.accounting.consumed import NOTHING_PREDICTED, Consumption, consumed
from gateway.errors import CLIENT_LEFT
from gateway.request.attempts import Attempts
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.record import Placement, SettledRequest
from gateway.request.running import RunningRequests
from gateway.request.settle import Observer, settle
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.http1 import SWITCHING
from router import Outcome


class EndPhase:
    """The end of requests (see the module). clock: monotonic seconds."""

    def __init__(
        self,
        attempts: Attempts,
        objects: ReplicaObjects,
        extensions: Extensions,
        running: RunningRequests,
        observers: list[Observer],
        clock: Callable[[], float],
    ) -> None:
        self._attempts = attempts
        self._objects = objects
        self._extensions = extensions
        self._running = running
        self._observers = observers
        self._clock = clock

    def delivered(self, exchange: Exchange, answer: ReplicaAnswer) -> None:
        """The answer was sent, complete or not."""
        record = exchange.record
        record.status = answer.status
        if answer.status < 400 and not exchange.delivered.error:
            record.answer.ok = record.answer.complete = True
            self._attempts.completed(exchange)
        if exchange.attempts.object:
            self._objects.answered(exchange)
        for delivered in self._extensions.delivered:
            delivered(exchange)

    def left(self, exchange: Exchange, left: BaseException) -> None:
        """The client has disconnected or cancelled the request, or the gateway ends all requests."""
        record = exchange.record
        if exchange.booked:
            record.answer.ok = exchange.booking.lease.decoding  # then the replica has cached the prompt
        if exchange.request.cancelled:
            record.status, record.cancelled = 200, True
            return
        record.status, record.error = CLIENT_LEFT, str(left) or "the client left"
        if not exchange.booked:
            return
        record.error = exchange.attempts.error or record.error
        delivered = exchange.delivered
        if delivered.done_sent or (delivered.reply and delivered.reply.satisfied):  # the answer was complete
            record.status, record.error = delivered.status, exchange.attempts.error
            record.answer.complete = record.answer.ok and delivered.status < 400
        elif delivered.reader and (reported := delivered.reader.reported):  # the client had read the engine's error
            record.status, record.error = delivered.status, reported.message

    def withdraw(self, exchange: Exchange) -> None:
        """Before an answer: the request needs no replica any more. Releases its slot and its booking, and forgets them."""
        exchange.leave_queue()
        if exchange.booked:
            self._attempts.drop_next_target(exchange)
            exchange.attempts.drop_refusal()
            exchange.booking.close(Outcome(False, shown=False), self._clock())
            exchange.booked, exchange.record.booking = False, None
        queued_s, exchange.record.placement = exchange.record.placement.queued_s, Placement()
        exchange.record.placement.queued_s = queued_s

    def settle(self, exchange: Exchange, task: asyncio.Task[object]) -> None:
        """Release the request's resources, complete the record, and give it to the observers."""
        try:
            self._settle(exchange, task)
        finally:
            exchange.leave_queue()  # when its booking is closed, so that the next request finds a free place

    def _settle(self, exchange: Exchange, task: asyncio.Task[object]) -> None:
        record = exchange.record
        self._running.leave(task)
        if exchange.parsed:
            exchange.api.drop()
        if exchange.booked:
            waits = exchange.attempts.next_target is not None or exchange.booking.lease.closed  # for another pool
            if exchange.attempts.next_target is not None:  # the client disconnected before that pool had the request
                self._attempts.drop_next_target(exchange)
            if exchange.attempts.refusal is not None:
                exchange.attempts.drop_refusal()
            _complete(record, exchange)
            if waits:
                record.spent.consumed = None  # all attempts in earlier pools have failed
        record.ended = self._clock()
        settle(record, self._observers)

    def unread(self, record: SettledRequest) -> None:
        """`settle` for a request that could not be read and has no resources."""
        record.ended = self._clock()
        settle(record, self._observers)


def _complete(record: SettledRequest, exchange: Exchange) -> None:
    """Copies the results of attempts and delivery into the record."""
    placement, answer, spent = record.placement, record.answer, record.spent
    chosen, attempts, delivered = exchange.booking.chosen, exchange.attempts, exchange.delivered
    placement.pool, placement.replica = placement.pool or exchange.target.pool, chosen.replica  # a fallback has set its pool
    placement.predicted_cached_tokens = chosen.matched_tokens
    if (prefilled := exchange.prefilled) is not None:
        placement.prefiller, placement.predicted_cached_tokens = prefilled.replica, prefilled.matched_tokens
        record.subject.countable = False  # the counts of cached tokens are not about the replica of the booking
    placement.available_cached_tokens = exchange.booking.decision.available_tokens
    placement.failed_attempts = attempts.failed
    placement.asked = placement.asked or attempts.asked
    answer.answered = delivered.status
    answer.first_token, answer.last_byte = delivered.first_token, delivered.last_byte
    answer.shown = delivered.shown or delivered.first_token is not None
    spent.usage, answer.resumed, spent.bill = exchange.usage, delivered.resumed, delivered.bill
    if answer.answered == SWITCHING and delivered.reply:
        spent.usage, answer.unread = delivered.reply.usage, delivered.reply.unread
        record.subject.countable = False  # the sum of several prompts
    spent.consumed = _consumed(record, exchange)
    answer.translated = exchange.answers.translated
    if not record.cancelled:
        record.error = record.error or delivered.error or attempts.error


def _consumed(record: SettledRequest, exchange: Exchange) -> Consumption | None:
    """The consumption to be charged. If the client disconnects before the answer's first byte, its prompt was still computed;
    an error consumes nothing.
    """
    answer, usage = record.answer, record.spent.usage
    if answer.answered == SWITCHING:
        return consumed(usage, NOTHING_PREDICTED, 0, whole=True) if usage else None
    ended = record.status == CLIENT_LEFT or record.cancelled or (exchange.ended_by is not None and exchange.attempts.asked)
    left = not answer.answered and ended
    if not record.subject.metered or not (answer.answered == 200 or left):
        return None
    return exchange.consumed(usage, whole=answer.complete or exchange.delivered.done_sent)
