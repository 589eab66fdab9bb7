"""What observes the ends of requests, and what that needs: composed here, for one process.

always       router outcome, cache reports, meter, metrics, log (`request/settle.py`)
if wanted    other policies (`routing.compare`)
on demand    the recording of traffic, while somebody records; the watch of the prefix doctor (`app.py`)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gateway.accounting.counterfactual import Counterfactual
from gateway.accounting.meter import Meter
from gateway.accounting.recording import Recording
from gateway.accounting.savings import Savings
from gateway.config.live import Live
from gateway.fleet.directory import Fleet
from gateway.request.settle import Observer, OtherPolicies, RecordTraffic, observers_of
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from router import Booking, Router


class Observing:
    """See the top of this file. now: Unix seconds. further: observers of whoever composes, after our own."""

    def __init__(
        self,
        live: Live,
        metrics: Metrics,
        requests: RequestLog,
        fleet: Fleet,
        router: Router,
        now: Callable[[], float],
        further: Sequence[Observer],
    ) -> None:
        self.meter = Meter(live, metrics, now)
        self.recording = Recording(lambda: f"{random.SystemRandom().getrandbits(64):016x}")
        self.counterfactual: Counterfactual | None = None
        self.observers = [*observers_of(fleet, self.meter, metrics, requests), *further]
        self._savings = Savings(metrics, now)
        RecordTraffic(self.recording, self.observers)
        if live.config.routing.compare:
            self.counterfactual = _counterfactual(live, fleet, router)
            self.observers.append(OtherPolicies(self.counterfactual, self.meter, self._savings))

    def set_gauges(self) -> None:
        """Before the metrics are read."""
        if self.counterfactual:
            self._savings.set_gauges()


def _counterfactual(live: Live, fleet: Fleet, router: Router) -> Counterfactual:
    """Follows the decisions of other processes from now on."""
    routing = live.config.routing

    def capacity(name: str) -> int | None:
        state = fleet.named(name)
        return (state.capacity_tokens if state else None) or router.learned_capacity(name)

    def followed(booking: Booking) -> None:
        lease, prompt = booking.lease, booking.prompt
        found.follow(prompt, fleet.siblings(lease.replica), lease.replica, lease.prompt_tokens, lease.since)

    found = Counterfactual(random.Random(), capacity, routing.ttl_s, routing.memory_mb << 19)
    router.followed = followed
    return found
