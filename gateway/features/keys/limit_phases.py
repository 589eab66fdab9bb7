"""Applies the limits of a key to a request: counts it before it queues, reserves tokens and money when a replica is chosen, and
settles the actual use at the end (an observer).

The price of a running request is estimated from the router's count of its prompt, the expected cached tokens, and an answer as
long as the key's longest recent one, but no longer than the request allows. In a session (a WebSocket to a replica), each
answer is counted when it has passed, and its price is reserved for the next one. An answer without readable usage counts as
the reserved one, and at least as its known part, also if the client leaves in the middle of it or before it begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.accounting.consumed import NOTHING_PREDICTED, Consumption, consumed
from gateway.accounting.meter import Meter
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError
from gateway.features.keys.grant import Grant
from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.limiter import Reservation
from gateway.features.keys.metrics import KeyMetrics
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot

RESERVATION: Final = Slot[Reservation]("keys.limits")


class LimitPhases:
    """The limits as phases of a request."""

    def __init__(self, keys: Keys, meter: Meter, metrics: KeyMetrics) -> None:
        self._keys = keys
        self._meter = meter
        self._metrics = metrics

    def waited(self, exchange: Exchange) -> None:
        """Checks the key again after the queue: it may have been revoked or expired. Raises GatewayError 401."""
        grant = exchange.caller.grant
        if isinstance(grant, Grant):
            grant.require_valid(self._keys.wall_clock())

    def require(self, grant: Grant) -> None:
        """Checks the limits without counting a request: before a connection or job whose requests come later. Raises
        GatewayError 429.
        """
        keys, limits = self._keys, grant.limits
        if limits is not None:
            try:
                keys.limiter.require(grant.id, limits, keys.moment())
            except GatewayError as error:
                self._metrics.limited.add((error.code,))
                raise

    def count(self, grant: Grant) -> None:
        """Counts a request that costs nothing. Raises GatewayError 429."""
        if grant.limits is not None:
            try:
                self._keys.limiter.count_free(grant.id, grant.limits, self._keys.moment())
            except GatewayError as error:
                self._metrics.limited.add((error.code,))
                raise

    def enter(self, exchange: Exchange) -> None:
        """Counts the request, once. Raises GatewayError 429."""
        keys, grant = self._keys, exchange.caller.grant
        if not isinstance(grant, Grant) or grant.limits is None or RESERVATION.get(exchange.record) is not None:
            return
        try:
            RESERVATION.set(exchange.record, keys.limiter.enter(grant.id, grant.limits, keys.moment()))
        except GatewayError as error:
            self._metrics.limited.add((error.code,))
            raise

    def reserve(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """Reserves the estimated tokens and money before the request is sent. Raises GatewayError 429."""
        keys, reservation, api, booking = self._keys, RESERVATION.get(exchange.record), exchange.api, exchange.booking
        if reservation is None or not (api.metered or exchange.request.upgrades):
            return
        prompt = booking.decision.prompt_tokens
        cached = min(max(0, booking.reservable_tokens), prompt)
        money = 0
        if reservation.priced:
            expected = Usage(prompt, reservation.output(api.answers, api.output), cached)
            bill = self._meter.bill(api.model, Consumption(expected, api.images))
            if bill is None:
                text = f"The model {api.model[:100]!r} has no price, and the key {reservation.account.id} has a budget."
                raise GatewayError(403, "model_not_priced", text, param="model")
            money = bill.total
        try:
            reservation.reserve(prompt - cached, money, keys.moment())
        except GatewayError as error:
            self._metrics.limited.add((error.code,))
            raise

    def answered(self, exchange: Exchange, usage: Usage | None, known: Usage) -> None:
        """Counts an answer in a session: as reported, else as reserved, and at least its known part. Raises GatewayError
        401 or 429 if there may be no other one.
        """
        keys, reservation, grant = self._keys, RESERVATION.get(exchange.record), exchange.caller.grant
        if reservation is not None:
            used = consumed(usage or known, NOTHING_PREDICTED, 0, whole=True)
            bill = self._meter.bill(exchange.api.model, used)
            tokens, output, money = used.usage.prompt - used.cached, used.usage.completion, bill.total if bill else 0
            if usage is None:
                reserved = reservation.output()
                tokens, output, money = max(tokens, reserved), max(output, reserved), max(money, reservation.money)
            try:
                reservation.count(tokens, output, money, keys.moment())
            except GatewayError as error:
                self._metrics.limited.add((error.code,))
                raise
        if isinstance(grant, Grant):
            grant.require_valid(keys.wall_clock())


class LimitSettlement:
    """Replaces the reservation of a finished request by its actual use. Counts the spending of keys without limits, too."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __call__(self, request: SettledRequest) -> None:
        reservation, used, bill = RESERVATION.get(request), request.spent.consumed, request.spent.bill
        if reservation is None:
            if bill is not None and bill.total and (id_ := request.sender.key):  # a key without limits
                self._keys.limiter.spend(id_, bill.total, self._keys.moment())
            return
        if reservation.answers:  # of a session, counted one by one
            used = bill = None
        uncached = used.usage.prompt - used.cached if used is not None else 0
        output = used.usage.completion if used is not None else 0
        money = bill.total if bill is not None else 0
        reservation.settle(uncached, output, money, self._keys.moment(), served=request.placement.asked or request.answer.own)
