"""The end of a request: the observers, in the order in which they are called.

An observer is a callable that takes a settled request. A new one costs a function, or a class if
it needs parts of the gateway, and one line in `observers_of`. What
one of them raises is logged and does not keep the others from their work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from gateway.accounting.consumed import CACHED, TOKENS, Consumed
from gateway.accounting.counterfactual import Counterfactual
from gateway.accounting.doctor.watch import Seen, Watch
from gateway.accounting.ledger.batches import MAX_CHARS
from gateway.accounting.ledger.buffer import size_of
from gateway.accounting.ledger.ledger import Ledger
from gateway.accounting.meter import Meter
from gateway.accounting.money import dollars
from gateway.accounting.savings import Savings
from gateway.fleet.directory import Fleet
from gateway.request.record import SettledRequest, code_label
from gateway.request.tracing.spans import spans_of
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recording import Recording
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.tracing.exporter import Exporter
from router import HELD, Outcome

log = logging.getLogger("warmroute.gateway")

NEW: Final = "new"
# A prefix counts as kept with so much of it, less a constant, for an engine caches whole blocks. Its tokens are an estimate:
# the router's, or its part of the prompt's bytes of the prompt's tokens, whichever is less.
_KEPT_SHARE: Final = 0.9
_KEPT_SLACK: Final = 128

Observer = Callable[[SettledRequest], None]


def observers_of(fleet: Fleet, meter: Meter, metrics: Metrics, requests: RequestLog) -> list[Observer]:
    """The program of a request's end. The router comes first: a lease is closed whatever else fails."""
    return [
        RouterOutcome(fleet),
        CacheReports(fleet),
        Metering(meter, metrics),
        Breakpoints(metrics),
        RequestMetrics(metrics),
        AccessLog(requests),
    ]


def settle(request: SettledRequest, observers: list[Observer]) -> None:
    """Call each of them once."""
    for observer in observers:
        try:
            observer(request)
        except Exception:  # the last border: a bug in one must not cost the others
            log.exception("observer failed", extra={"id": request.id})


class RouterOutcome:
    """Closes the booking: what the engine reported is what the router learns from."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if booking is None:
            return
        usage = request.usage if request.countable else None
        outcome = Outcome(request.ok, usage.prompt if usage else None, usage.cached if usage else None)
        if booking.close(outcome, request.ended):
            self._fleet.zero_hits(request.replica)


class CacheReports:
    """Compares the cached tokens that were predicted with those that the engine reported."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, request: SettledRequest) -> None:
        if request.metered and request.answered == 200 and request.usage:
            self._fleet.metered(request.replica, request.predicted_cached_tokens, request.usage.cached)


class Metering:
    """Counts tokens and money. An answer that should have had a usage, and had none, is estimated, and counted as such."""

    def __init__(self, meter: Meter, metrics: Metrics) -> None:
        self._meter = meter
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        booking, label, usage = request.booking, request.label, request.usage
        if booking is None:
            return
        if used := request.consumed:
            bill = request.bill or self._meter.bill(request.model, used)
            request.bill = bill
            self._meter.count(used, bill, model=label, replica=request.replica, tenant=request.tenant)
        if request.unread:
            self._metrics.unmetered.add((label, request.endpoint))
        if not request.generates or request.answered != 200:
            return
        if request.complete and not usage:
            self._metrics.unmetered.add((label, request.endpoint))
        if request.metered:
            self._metrics.predicted_cached.add((label, request.replica), request.predicted_cached_tokens)
            self._metrics.available_cached.add((label,), booking.decision.available_tokens)


class OtherPolicies:
    """Counts what other policies would have found cached, and what that is worth (`accounting/counterfactual.py`)."""

    def __init__(self, counterfactual: Counterfactual, meter: Meter, savings: Savings) -> None:
        self._counterfactual = counterfactual
        self._meter = meter
        self._savings = savings

    def __call__(self, request: SettledRequest) -> None:
        placed, booking, used = request.placed, request.booking, request.consumed
        if placed is None:
            return
        self._counterfactual.ended(placed)
        if booking is None or used is None or request.usage is None or request.usage.cached is None or not request.ok:
            return  # what the engine has delivered is not known
        decision, prompt = booking.decision, used.usage.prompt
        scale = prompt / max(1, decision.prompt_tokens)
        cached = [min(each * scale, prompt) for each in placed.cached]
        token_s = 1 / decision.best.prefill_rate if decision.best.prefill_rate > 0 else 0.0
        self._savings.add(prompt, used.cached, cached, token_s, self._meter.token_savings(request.model, prompt))


class Breakpoints:
    """What became of what was promised to clients that mark breakpoints: the router's word, then the engine's."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if booking is None or not booking.prompt.breakpoints:
            return
        decision, usage = booking.decision, request.usage
        found = decision.promise or NEW
        if found == HELD and not request.ok:
            found = "failed"
        elif found == HELD and (usage is None or usage.cached is None):
            found = "unreported"
        elif found == HELD and usage is not None and usage.cached is not None:
            promised = min(decision.promised_tokens, decision.promised_tokens / max(1, decision.prompt_tokens) * usage.prompt)
            found = "kept" if usage.cached >= promised * _KEPT_SHARE - _KEPT_SLACK else "missed"
        request.breakpoint = found
        self._metrics.breakpoints.add((request.label, found))


class RequestMetrics:
    """Counts and times every request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, request: SettledRequest) -> None:
        metrics, label, endpoint, first = self._metrics, request.label, request.endpoint, request.first_byte
        metrics.requests.add((label, endpoint, code_label(request.status)))
        metrics.request_seconds.observe((label, endpoint), request.ended - request.begun)
        if first is not None:
            cache = "hit" if request.predicted_cached_tokens else "miss"
            metrics.ttft_seconds.observe((label, endpoint, cache), first - request.begun)
            if request.usage and request.usage.completion > 1 and request.last_byte is not None:
                metrics.inter_token_seconds.observe((label,), (request.last_byte - first) / (request.usage.completion - 1))


class RecordTraffic:
    """Keeps a row of every request that a replica has got, for recorders. An observer only while there are some."""

    def __init__(self, recording: Recording, observers: list[Observer]) -> None:
        """observers: of the gateway; it joins them and leaves them as the recording begins and ends."""
        self._recording = recording
        self._observers = observers
        recording.begin, recording.end = self._begin, self._end

    def _begin(self) -> None:
        self._observers.append(self)

    def _end(self) -> None:
        self._observers.remove(self)

    def __call__(self, request: SettledRequest) -> None:
        booking, recording, usage = request.booking, self._recording, request.usage
        if booking is None or not request.generates or not request.countable:
            recording.skipped += 1
            return
        prompt = booking.prompt
        if not recording.wants(prompt.session_key):
            return
        first = request.first_byte if request.stream else None
        row = (
            request.begun,
            None if first is None else first - request.begun,
            request.ended - request.begun,
            usage.prompt if usage else None,
            request.estimated_prompt_tokens,
            usage.completion if usage else None,
            usage.cached if usage else None,
            request.predicted_cached_tokens,
            prompt.units,
            prompt.block_units,
            not prompt.scale,
            prompt.keys,
            prompt.session_key,
            prompt.client,
            request.status,
            request.label,
            request.pool,
            request.replica,
            request.tenant,
        )
        recording.add(prompt.session_key, prompt.keys, row)


class LedgerEntries:
    """What the ledger keeps of every request. Texts that clients choose are cut: the rest of them would fill its memory."""

    def __init__(self, ledger: Ledger) -> None:
        self._buffer = ledger.buffer
        self._now = ledger.wall_clock

    def __call__(self, request: SettledRequest) -> None:
        begun, first = request.begun, request.first_byte
        model, alias, error = request.model[:MAX_CHARS], request.alias[:MAX_CHARS], request.error[:MAX_CHARS]
        self._buffer.add(
            (
                self._now(),
                request.id,
                request.tenant,
                request.key,
                request.label,
                model,
                alias,
                request.pool,
                request.replica,
                request.endpoint,
                request.status,
                request.stream,
                request.cancelled,
                request.resumed,
                len(request.failed_attempts),
                error,
                request.ended - begun,
                None if first is None else first - begun,
                request.predicted_cached_tokens,
                request.available_cached_tokens,
                request.consumed,
                request.bill,
                size_of(model, alias, error),
            )
        )


class AccessLog:
    """Writes one line for every request."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests

    def __call__(self, request: SettledRequest) -> None:
        broken = request.status < 400 and request.error  # after the status had gone out
        level = logging.WARNING if broken or request.status >= 500 else logging.INFO
        self._requests.write(level, _line(request))


class Traces:
    """Hands the spans of a traced request to the exporter's thread."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def __call__(self, request: SettledRequest) -> None:
        if request.trace is not None:
            self._exporter.put(spans_of(request, request.trace))


class DoctorWatch:
    """Remembers requests for the prefix doctor, while an operator is interested."""

    def __init__(self, fleet: Fleet, watch: Watch) -> None:
        self._fleet = fleet
        self._watch = watch

    def __call__(self, request: SettledRequest) -> None:
        booking = request.booking
        if not self._watch.on or booking is None or not request.metered or request.answered != 200:
            return
        prompt, decision, usage = booking.prompt, booking.decision, request.usage
        counted = usage if request.countable else None
        self._watch.saw(
            Seen(
                time=request.begun,
                model=request.model,
                salt=request.salt,
                tenant=request.tenant,
                session=prompt.session,
                keys=prompt.keys,
                units=prompt.units,
                block=prompt.block_units,
                exact=not prompt.scale,
                outline=request.outline,
                replica=request.replica,
                prompt_tokens=counted.prompt if counted else None,
                cached_tokens=counted.cached if counted else None,
                available_tokens=decision.available_tokens,
                reason=decision.reason,
                ups=tuple([state.name for state in self._fleet.replicas if state.up]),
                first_byte=request.first_byte,
            )
        )


def _microseconds(seconds: float) -> float:
    """Rounded to them; not negative. `round` makes a decimal text first, and reads it: which takes a hundred times as much."""
    return int(seconds * 1e6 + 0.5) / 1e6


def _estimates(used: Consumed) -> dict[str, Any]:
    """The counts that the engine did not report. The predicted cached tokens have a name of their own in the line."""
    line: dict[str, Any] = {"estimated": used.estimated}
    if used.estimated == TOKENS:
        line["prompt_tokens"] = used.usage.prompt
    if used.estimated != CACHED:
        line["completion_tokens"] = used.usage.completion
    return line


def _waited_and_traced(request: SettledRequest) -> dict[str, Any]:
    """What few requests have."""
    waited = {"queued_s": _microseconds(request.queued_s)} if request.queued_s else {}
    return waited if request.trace is None else {**waited, "trace_id": request.trace.trace_id}


def _line(request: SettledRequest) -> dict[str, Any]:
    usage, bill, used = request.usage, request.bill, request.consumed
    line = {
        "id": request.id,
        "path": request.path,
        "model": request.model[:100],
        "tenant": request.tenant,
        "replica": request.replica,
        "reason": request.reason,
        "status": request.status,
        "stream": request.stream,
        "ttft_s": None if request.first_byte is None else _microseconds(request.first_byte - request.begun),
        "seconds": _microseconds(request.ended - request.begun),
        "prompt_tokens": usage.prompt if usage else None,
        "estimated_prompt_tokens": request.estimated_prompt_tokens,
        "cached_tokens_predicted": request.predicted_cached_tokens,
        "cached_tokens_reported": usage.cached if usage else None,
        "completion_tokens": usage.completion if usage else None,
        "cost_usd": dollars(bill.total) if bill else None,
        "saved_usd": dollars(bill.saved) if bill else None,
    }
    if used and used.estimated:
        line |= _estimates(used)
    if request.queued_s or request.trace is not None:
        line |= _waited_and_traced(request)
    if usage and usage.written:
        line["cache_write_tokens"] = usage.written
    if request.breakpoint:
        line["breakpoint"] = request.breakpoint
    if request.translated:
        line["translated"] = True
    if request.alias:
        line["model_alias"] = request.alias[:100]
    if request.passed:
        line["fallback"] = " -> ".join((*request.passed, request.pool))
    if request.resumed:
        line["resumed"] = request.resumed
    if request.failed_attempts:
        line["failed_attempts"] = request.failed_attempts
    if request.cancelled:
        line["cancelled"] = True
    if request.error:
        line["error"] = request.error
    return line
