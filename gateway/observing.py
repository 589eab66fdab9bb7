"""What observes the ends of requests, and what that needs: composed here, all of it, for one process.

always       router outcome, cache reports, meter, metrics, log (`request/settle.py`), then those of whoever composes
if wanted    the ledger (`ledger.url`), other policies (`routing.compare`), traces (`tracing.endpoint`), limits (`keys`)
on demand    the recording of traffic, while somebody records; the watch of the prefix doctor; the live page, while it is open

The order matters in one point: what is always there comes first, for the others read the bill that it has made.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

from gateway import __version__
from gateway.accounting.meter import Meter
from gateway.cluster.topics import Topics
from gateway.config.listen import OFF
from gateway.config.live import Live
from gateway.config.schema import TracingConfig
from gateway.dialects.prompt.outline import Outliner
from gateway.features.doctor import watch
from gateway.features.doctor.observer import DoctorWatch
from gateway.features.doctor.watch import Watch
from gateway.features.keys.keys import Keys
from gateway.features.keys.limiting import Limiting, LimitSettling
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import Ledger
from gateway.features.live_page import view
from gateway.features.live_page.feed import Feed
from gateway.features.live_page.requests import LiveRequests
from gateway.features.live_page.sums import PoolLoad, Sums
from gateway.features.live_page.view import LiveView
from gateway.features.recording import recording
from gateway.features.recording.observer import RecordTraffic
from gateway.features.recording.recording import Recording
from gateway.features.savings.counterfactual import Counterfactual
from gateway.features.savings.other_policies import OtherPolicies
from gateway.features.savings.savings import Savings
from gateway.features.tracing.exporter import Exporter
from gateway.features.tracing.observer import Traces
from gateway.features.tracing.sampling import Tracer
from gateway.fleet.directory import Fleet
from gateway.request.settle import Observer, observers_of
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from router import Booking, Router
from router.index import trie


class Observing:
    """See the top of this file. now: Unix seconds. further: of whoever composes."""

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
        self.recording = Recording(_new_id)
        self.watch = Watch(Outliner())  # until `begin_watch`
        self.counterfactual: Counterfactual | None = None
        self.observers = [*observers_of(fleet, self.meter, metrics, requests), *further]
        self.ledger: Ledger | None = None
        if live.config.ledger.url != OFF:
            self.ledger = Ledger(live.config.ledger, metrics, now)
            self.observers.append(LedgerEntries(self.ledger))
        self._savings = Savings(metrics, now)
        RecordTraffic(self.recording, self.observers)
        self.live_view = LiveView(_new_id(), Feed(_new_id), Sums(metrics, lambda: _loads(fleet), time.perf_counter))
        self.live_requests = LiveRequests(self.live_view.feed, self.observers, now)
        if live.config.routing.compare:
            self.counterfactual = _counterfactual(live, fleet, router)
            self.observers.append(OtherPolicies(self.counterfactual, self.meter, self._savings))
        self._metrics = metrics
        self._requests = requests
        metrics.set_build(__version__, compiled=not trie.__file__.endswith(".py"))
        self.exporter = _exporter(live.config.tracing)
        self.tracer = Tracer(live, random.Random(), now) if self.exporter else None
        if self.exporter:
            self.observers.append(Traces(self.exporter))

    def begin_watch(self, outliner: Outliner, fleet: Fleet) -> None:
        """The prefix doctor's; it sees nothing until an operator asks."""
        self.watch = Watch(outliner)
        self.observers.append(DoctorWatch(fleet, self.watch))

    def answer(self, topics: Topics, clock: Callable[[], float]) -> None:
        """Answer the questions of operators, which go to all processes."""
        topics.answers(recording.TOPIC, lambda question: self.recording.answer(question, clock()))
        topics.answers(view.TOPIC, lambda question: self.live_view.answer(question, clock()))
        topics.answers(watch.TOPIC, lambda _question: self.watch.answer(clock()))

    def limits(self, keys: Keys | None) -> Limiting:
        """What keys may use, and what they have used. None: there are no keys."""
        if keys is not None:
            self.observers.append(LimitSettling(keys))
        return Limiting(keys, self.meter, self._metrics)

    def set_gauges(self) -> None:
        """Before the metrics are read."""
        self._metrics.set_process_gauges()
        self._metrics.log_lines_dropped.set((), self._requests.dropped)
        if self.exporter:
            self.exporter.count(self._metrics)
        if self.counterfactual:
            self._savings.set_gauges()


def _new_id() -> str:
    return f"{random.SystemRandom().getrandbits(64):016x}"


def _loads(fleet: Fleet) -> dict[str, PoolLoad]:
    return {pool.name: (pool.admission.waiting, pool.admission.inflight, pool.admission.max_inflight) for pool in fleet.pools}


def _exporter(tracing: TracingConfig) -> Exporter | None:
    """Of traces, where they are configured. The library is imported now: later, that would hold requests up."""
    if tracing.endpoint == OFF:
        return None
    from gateway.features.tracing.otlp import OtlpSender

    return Exporter(OtlpSender(tracing.endpoint, os.environ.get("OTEL_SERVICE_NAME") or "warmroute", __version__))


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
