"""Several gateways in front of the simulated fleet, each with a production router of its own.

Each request comes to any of them, as behind a plain load balancer. A booking of one reaches the others after a delay, by the
gateways' own replication log: the delay stands for the batches, the store and the network between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from router.booking import Booking
from router.events import Event
from router.follower import Follower
from router.replication_log import Journal
from router.router import Router
from router.simulation.fleet import FleetSpec, RouterPlacement
from router.simulation.workloads import SimulatedRequest
from router.types import Outcome, Random

NEVER: Final = math.inf  # the delay of gateways that do not share
_PRUNE: Final = 4096  # batches of the log, applied by all, before they are removed


class _Batch(NamedTuple):
    """due: time at which the others apply it."""

    due: float
    gateway: int
    events: list[Event]


class _Gateway:
    """One gateway. known: number of batches of the log that it has applied, or made."""

    def __init__(self, number: int, router: Router, spec: FleetSpec) -> None:
        self.number = number
        self.placement = RouterPlacement(router, spec)
        self.follower = Follower(router)
        self.known = 0


class Gateways:
    """A `Placement` by several routers; the handle of a request names the router that placed it.

    Each router applies the bookings of all, as in a gateway: the time of a run grows with the number of gateways.
    """

    def __init__(self, routers: Sequence[Router], spec: FleetSpec, *, delay_s: float, chance: Random) -> None:
        """delay_s: until the others apply a booking; NEVER: they do not share. chance: chooses the gateway of a request."""
        self._gateways = [_Gateway(number, router, spec) for number, router in enumerate(routers)]
        self._delay_s = delay_s
        self._chance = chance
        self._log: list[_Batch] = []
        self._pruned = 0  # number of batches removed from the log
        if delay_s < NEVER:
            for router in routers:
                router.journal = Journal(_nothing)

    @property
    def logged(self) -> int:
        """Batches that some gateway may not have applied yet."""
        return len(self._log)

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, tuple[_Gateway, Booking]]:
        gateway = self._gateways[int(self._chance.random() * len(self._gateways))]
        self._follow(gateway, now)
        number, booking = gateway.placement.place(request, now)
        self._publish(gateway, now)
        return number, (gateway, booking)

    def booking_of(self, handle: tuple[_Gateway, Booking]) -> Booking | None:
        return handle[1]

    def first_token(self, handle: tuple[_Gateway, Booking], now: float) -> None:
        gateway, booking = handle
        self._follow(gateway, now)
        gateway.placement.first_token(booking, now)
        self._publish(gateway, now)

    def finished(self, handle: tuple[_Gateway, Booking], outcome: Outcome, now: float) -> None:
        gateway, booking = handle
        self._follow(gateway, now)
        gateway.placement.finished(booking, outcome, now)
        self._publish(gateway, now)

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None:
        for gateway in self._gateways:
            self._follow(gateway, now)
            gateway.placement.reported(replica, running, waiting, now)

    def _publish(self, gateway: _Gateway, now: float) -> None:
        journal = gateway.placement.router.journal
        if journal and (events := journal.take()):
            self._log.append(_Batch(now + self._delay_s, gateway.number, events))

    def _follow(self, gateway: _Gateway, now: float) -> None:
        """Apply the batches of the others that are due."""
        log, at = self._log, gateway.known - self._pruned
        while at < len(log) and log[at].due <= now:
            if log[at].gateway != gateway.number:
                gateway.follower.apply(log[at].gateway, log[at].events)
            at += 1
        gateway.known = at + self._pruned
        if at > _PRUNE:
            old = min(each.known for each in self._gateways) - self._pruned
            if old > _PRUNE:
                del log[:old]
                self._pruned += old


def _nothing() -> None:
    """The journal is emptied after each call, so nothing is scheduled."""
