"""The end of a request: the observers, in the order in which they are called.

An observer is a callable that takes a settled request. A new one needs a function, or a class if it uses parts of the gateway,
and one line in `observers_of`. An exception from one observer is logged, and the others are still called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from gateway.accounting.meter import Meter
from gateway.fleet.directory import Fleet
from gateway.request.observers.access_log import AccessLog
from gateway.request.record import SettledRequest, code_label
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from router import HELD, Outcome

log = logging.getLogger("warmroute.gateway")

NEW: Final = "new"
# A prefix counts as cached with at least this share of its tokens less a constant, because an engine caches whole blocks. Its
# tokens are estimated: by the router, or by its share of the prompt's bytes; the smaller estimate counts.
_KEPT_SHARE: Final = 0.9
_KEPT_SLACK: Final = 128

Observer = Callable[[SettledRequest], None]


def observers_of(fleet: Fleet, meter: Meter, metrics: Metrics, requests: RequestLog) -> list[Observer]:
    """The observers in their order. The router comes first: a lease is closed even if the others fail."""
    return [
        RouterOutcome(fleet),
        CacheReports(fleet),
        ConsumptionMeter(meter, metrics),
        BreakpointOutcomes(metrics),
        RequestMetrics(metrics),
        AccessLog(requests),
    ]


def settle(request: SettledRequest, observers: list[Observer]) -> None:
    """Calls each observer once."""
    for observer in observers:
        try:
            observer(request)
        except Exception:  # the outermost handler: a bug in one observer must not affect the others
            log.exception("observer failed", extra={"id": request.id})


class RouterOutcome:
    """Closes the booking: the router learns from the engine's report."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if booking is None:
            return
        answer, usage = request.answer, request.spent.usage
        prompt, cached = (usage.prompt, usage.cached) if usage else (None, None)
        outcome = Outcome(answer.ok, prompt, cached, shown=answer.shown, countable=request.subject.countable)
        if booking.close(outcome, request.ended):
            self._fleet.zero_hits(request.placement.replica)


class CacheReports:
    """Compares the predicted cached tokens with the engine's report."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, request: SettledRequest) -> None:
        placement, answer, usage = request.placement, request.answer, request.spent.usage
        if request.subject.metered and answer.answered == 200 and usage:
            self._fleet.metered(placement.prefiller or placement.replica, placement.predicted_cached_tokens, usage.cached)


class ConsumptionMeter:
    """Counts tokens and money. An answer without an expected usage is estimated, and counted as such."""

    def __init__(self, meter: Meter, metrics: Metrics) -> None:
        self._meter = meter
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        booking, subject, placement = request.booking, request.subject, request.placement
        answer, spent, label, usage = request.answer, request.spent, request.subject.label, request.spent.usage
        if booking is None:
            return
        if used := spent.consumed:
            bill = spent.bill or self._meter.bill(subject.model, used)
            spent.bill = bill
            self._meter.count(used, bill, model=label, replica=placement.replica, tenant=request.sender.tenant)
        if answer.unread:
            self._metrics.unmetered.add((label, subject.endpoint))
        if not subject.generates or answer.answered != 200:
            return
        if answer.complete and not usage:
            self._metrics.unmetered.add((label, subject.endpoint))
        if subject.metered:
            self._metrics.predicted_cached.add(
                (label, placement.prefiller or placement.replica), placement.predicted_cached_tokens
            )
            self._metrics.available_cached.add((label,), booking.decision.available_tokens)


class BreakpointOutcomes:
    """Checks the caching that breakpoints promise to clients: the router's prediction, then the engine's report."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if booking is None or not booking.prompt.breakpoints:
            return
        decision, usage = booking.decision, request.spent.usage
        found = decision.promise or NEW
        if found == HELD and not request.answer.ok:
            found = "failed"
        elif found == HELD and (usage is None or usage.cached is None):
            found = "unreported"
        elif found == HELD and usage is not None and usage.cached is not None:
            promised = min(decision.promised_tokens, decision.promised_tokens / max(1, decision.prompt_tokens) * usage.prompt)
            found = "kept" if usage.cached >= promised * _KEPT_SHARE - _KEPT_SLACK else "missed"
        request.breakpoint = found
        self._metrics.breakpoints.add((request.subject.label, found))


class RequestMetrics:
    """Counts and times every request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        metrics, subject, answer, usage = self._metrics, request.subject, request.answer, request.spent.usage
        label, endpoint, first = subject.label, subject.endpoint, answer.first_token
        metrics.requests.add((label, endpoint, code_label(request.status)))
        metrics.request_seconds.observe((label, endpoint), request.ended - request.begun)
        if first is not None:
            cache = "hit" if request.placement.predicted_cached_tokens else "miss"
            metrics.ttft_seconds.observe((label, endpoint, cache), first - request.begun)
            if usage and usage.completion > 1 and answer.last_byte is not None:
                metrics.inter_token_seconds.observe((label,), (answer.last_byte - first) / (usage.completion - 1))
