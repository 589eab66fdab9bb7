"""The limits of a key, in the phases of a request: one request more before it waits, its tokens and price once it is booked,
what it has used at its end (an observer).

The price of a request that runs is an estimate: its prompt as the router has it, cached where that is believed to be, and an
answer as long as the key's longest recent one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.accounting.consumed import Consumption
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


class Limiting:
    """See the top of this file."""

    def __init__(self, keys: Keys, meter: Meter, metrics: KeyMetrics) -> None:
        self._keys = keys
        self._meter = meter
        self._metrics = metrics

    def waited(self, exchange: Exchange) -> None:
        """The key may have ended meanwhile. Raises GatewayError 401."""
        grant = exchange.caller.grant
        if isinstance(grant, Grant):
            grant.require_valid(self._keys.wall_clock())

    def require(self, grant: Grant) -> None:
        """Before something is opened, or begun, whose requests come later. Raises GatewayError 429."""
        keys, limits = self._keys, grant.limits
        if limits is not None:
            try:
                keys.limiter.require(grant.id, limits, keys.moment())
            except GatewayError as error:
                self._metrics.limited.add((error.code,))
                raise

    def enter(self, exchange: Exchange) -> None:
        """Raises GatewayError 429."""
        keys, grant = self._keys, exchange.caller.grant
        if not isinstance(grant, Grant) or grant.limits is None:
            return
        try:
            RESERVATION.set(exchange.record, keys.limiter.enter(grant.id, grant.limits, keys.moment()))
        except GatewayError as error:
            self._metrics.limited.add((error.code,))
            raise

    def expect(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """Nothing has been sent yet. Raises GatewayError 429."""
        keys, reservation, api, booking = self._keys, RESERVATION.get(exchange.record), exchange.api, exchange.booking
        if reservation is None or not api.metered:
            return
        prompt = booking.decision.prompt_tokens
        cached = min(max(0, booking.chosen.matched_tokens), prompt)
        money = 0
        if reservation.priced:
            bill = self._meter.bill(api.model, Consumption(Usage(prompt, reservation.output, cached), api.images))
            money = bill.total if bill is not None else 0
        try:
            reservation.expect(prompt - cached, money, keys.moment())
        except GatewayError as error:
            self._metrics.limited.add((error.code,))
            raise


class LimitSettling:
    """What a request has used, in the place of what was reserved for it."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def __call__(self, request: SettledRequest) -> None:
        reservation, used, bill = RESERVATION.get(request), request.spent.consumed, request.spent.bill
        if reservation is None:
            return
        uncached = used.usage.prompt - used.cached if used is not None else 0
        output = used.usage.completion if used is not None else 0
        money = bill.total if bill is not None else 0
        reservation.settle(uncached, output, money, self._keys.moment(), served=request.placement.asked)
