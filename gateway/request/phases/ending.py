"""How a request has ended: its record is completed, what it has held is released, and the observers get the record.

Attempts and delivery keep what they have found in logs of their own (`exchange.py`); here it goes into the record, once.
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
from gateway.request.record import SettledRequest
from gateway.request.running import Running
from gateway.request.settle import Observer, settle
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.http1 import SWITCHING


class Ending:
    """See the top of this file. clock: monotonic seconds."""

    def __init__(
        self,
        attempts: Attempts,
        objects: ReplicaObjects,
        extensions: Extensions,
        running: Running,
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
        """The answer went out, whole or not."""
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
        """The client has left, or has cancelled it, or all requests are to end."""
        record = exchange.record
        if exchange.booked:
            record.answer.ok = exchange.booking.lease.decoding  # what the replica has prefilled by now it does hold
        if exchange.request.cancelled:
            record.status, record.cancelled = 200, True
            return
        record.status, record.error = CLIENT_LEFT, str(left) or "the client left"
        if not exchange.booked:
            return
        record.error = exchange.attempts.error or record.error
        delivered = exchange.delivered
        if delivered.done_sent or (delivered.reply and delivered.reply.satisfied):  # it had everything
            record.status, record.error = delivered.status, exchange.attempts.error
            record.answer.complete = record.answer.ok and delivered.status < 400
        elif delivered.reader and (reported := delivered.reader.reported):  # it left when it had read that the engine failed
            record.status, record.error = delivered.status, reported.message

    def settle(self, exchange: Exchange, task: asyncio.Task[object]) -> None:
        """Release what the request has held, complete the record, and give it to the observers."""
        record = exchange.record
        exchange.leave_queue()
        self._running.leave(task)
        if exchange.parsed:
            exchange.api.drop()
        if exchange.booked:
            waits = exchange.attempts.elsewhere is not None or exchange.booking.lease.closed  # for another pool
            if exchange.attempts.elsewhere is not None:  # the client has left before that pool had it
                self._attempts.not_elsewhere(exchange)
            if exchange.attempts.refusal is not None:
                exchange.attempts.drop_refusal()
            _complete(record, exchange)
            if waits:
                record.spent.consumed = None  # all attempts in the pools before have failed
        record.ended = self._clock()
        settle(record, self._observers)

    def unread(self, record: SettledRequest) -> None:
        """The same for a request that could not be read: it holds nothing."""
        record.ended = self._clock()
        settle(record, self._observers)


def _complete(record: SettledRequest, exchange: Exchange) -> None:
    """What attempts and delivery have found."""
    placement, answer, spent = record.placement, record.answer, record.spent
    chosen, attempts, delivered = exchange.booking.chosen, exchange.attempts, exchange.delivered
    placement.pool, placement.replica = placement.pool or exchange.target.pool, chosen.replica  # a fallback has named its pool
    placement.predicted_cached_tokens = chosen.matched_tokens
    placement.available_cached_tokens = exchange.booking.decision.available_tokens
    placement.failed_attempts = attempts.failed
    placement.asked = placement.asked or attempts.asked
    answer.answered = delivered.status
    answer.first_byte, answer.last_byte = delivered.first_byte, delivered.last_byte
    spent.usage, answer.resumed, spent.bill = exchange.usage, delivered.resumed, delivered.bill
    if answer.answered == SWITCHING and delivered.reply:
        spent.usage, answer.unread = delivered.reply.usage, delivered.reply.unread
        record.subject.countable = False  # the sum of several prompts
    spent.consumed = _consumed(record, exchange)
    answer.translated = exchange.answers.translated
    if not record.cancelled:
        record.error = record.error or delivered.error or attempts.error


def _consumed(record: SettledRequest, exchange: Exchange) -> Consumption | None:
    """What is to be paid for. A client that leaves before the answer's first byte has had its prompt computed; an answer that
    is an error has consumed nothing.
    """
    answer, usage = record.answer, record.spent.usage
    if answer.answered == SWITCHING:
        return consumed(usage, NOTHING_PREDICTED, 0, whole=True) if usage else None
    left = not answer.answered and (record.status == CLIENT_LEFT or record.cancelled)
    if not record.subject.metered or not (answer.answered == 200 or left):
        return None
    return exchange.consumed(usage, whole=answer.complete or exchange.delivered.done_sent)
