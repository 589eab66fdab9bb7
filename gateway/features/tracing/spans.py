"""The spans of a traced request, made from its record at its end. Pure.

    chat qwen3 (server) ─┬─ receive ── parse ── recall ── admit ── choose        the phases of the request
                         ├─ attempt (client), one for each call to a replica
                         └─ deliver

Names follow OpenTelemetry's conventions for generative AI and for HTTP; other names begin with `warmroute.`. They are constants
here, because the library's module of names changes with each release.

A span contains no text of a prompt or an answer, no header and no key. Error texts of engines are left out too, because they
may quote a prompt: the log has them, by the request's id. All strings are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from gateway.accounting.money import dollars
from gateway.errors import CLIENT_LEFT
from gateway.features.tracing.span import CLIENT, SERVER, Span, Value
from gateway.features.tracing.trace import Attempt, Choice, Trace
from gateway.request.notes import ADMIT, CHOOSE, DELIVER
from gateway.request.record import SettledRequest

OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""By endpoint: the convention's name of the operation."""

_OF_STEPS: Final[Mapping[str, str]] = {"run": "warmroute.run", "workflow": "warmroute.workflow"}
"""By field of the log line: of a step of a workflow."""

MAX_CHARS: Final = 100  # of a name from a client or a replica
MAX_TEXT: Final = 300  # characters of an error
NO_PROVIDER: Final = "warmroute"  # without an attempt


def spans_of(request: SettledRequest, trace: Trace) -> list[Span]:
    """The spans of a request, its own first."""
    return [_root(request, trace), *_phases(request, trace), *(_attempt(one, request, trace) for one in trace.attempts)]


def _root(request: SettledRequest, trace: Trace) -> Span:
    operation = OPERATIONS.get(request.subject.endpoint)
    name = (
        f"{operation} {request.subject.label[:MAX_CHARS]}" if operation else f"{trace.method[:16]} {request.subject.endpoint}"
    )
    begun = min(trace.phases[0].begun, request.begun) if trace.phases else request.begun  # an upload starts before `begun`
    span = Span(trace.trace_id, trace.span_id, trace.parent_id, name, *_times(trace, begun, request.ended))
    span.kind, span.remote = SERVER, trace.remote
    span.attributes = _attributes(request, trace)
    if operation:
        span.attributes |= _generation(request, trace, operation)
    if request.status == CLIENT_LEFT:
        span.attributes["error.type"] = "client_left"
    elif request.status >= 500 or (request.status < 400 and request.error):
        span.error = ""
        span.attributes["error.type"] = (
            (request.status >= 400 and request.code) or _failure(trace) or request.code or str(request.status)
        )
    elif request.code:
        span.attributes["error.type"] = request.code  # a client error: by the conventions no error of a server's span
    return span


def _failure(trace: Trace) -> str:
    """Reason of the last attempt's failure; "" without one."""
    return trace.attempts[-1].failure if trace.attempts else ""


def _attributes(request: SettledRequest, trace: Trace) -> dict[str, Value]:
    """Attributes of every request."""
    found: dict[str, Value] = {
        "http.request.method": trace.method[:16],
        "http.route": request.subject.endpoint,
        "http.response.status_code": request.status,
        "warmroute.request_id": request.id,
        "warmroute.tenant": request.sender.tenant,
    }
    if trace.choices:
        found["warmroute.pool"] = trace.choices[-1].pool
    if request.placement.replica:
        found["warmroute.replica"] = request.placement.replica
        found["warmroute.attempts"] = trace.tried
    if request.placement.passed:
        found["warmroute.fallback.passed_pools"] = list(request.placement.passed)
    if request.answer.resumed:
        found["warmroute.resumed"] = request.answer.resumed
    if request.answer.translated:
        found["warmroute.translated"] = True
    for key, name in _OF_STEPS.items():
        if request.fields is not None and key in request.fields:
            found[name] = request.fields[key]
    if request.cancelled:
        found["warmroute.cancelled"] = True
    if request.spent.bill is not None:
        found["warmroute.cost_usd"] = dollars(request.spent.bill.total)
        found["warmroute.saved_usd"] = dollars(request.spent.bill.saved)
        if request.spent.consumed is not None and request.spent.consumed.estimated:
            found["warmroute.estimated"] = request.spent.consumed.estimated
    return found


def _generation(request: SettledRequest, trace: Trace, operation: str) -> dict[str, Value]:
    """Attributes of a request to a model."""
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": trace.attempts[-1].engine if trace.attempts else NO_PROVIDER,
        "gen_ai.request.model": request.subject.model[:MAX_CHARS],
        "gen_ai.request.stream": request.subject.stream,
    }
    if request.subject.alias:
        found["warmroute.model_alias"] = request.subject.alias[:MAX_CHARS]
    if request.answer.first_token is not None:
        found["gen_ai.response.time_to_first_chunk"] = request.answer.first_token - request.begun
    if usage := request.spent.usage:
        found["gen_ai.usage.input_tokens"] = usage.prompt
        found["gen_ai.usage.output_tokens"] = usage.completion
        if usage.cached is not None:
            found["gen_ai.usage.cache_read.input_tokens"] = usage.cached
        if usage.written:
            found["gen_ai.usage.cache_creation.input_tokens"] = usage.written
    return found


def _phases(request: SettledRequest, trace: Trace) -> list[Span]:
    """Spans of the phases. A phase ends when the next phase or attempt begins; `deliver` ends with the request."""
    spans, choices = list[Span](), iter(trace.choices)
    begins = sorted([phase.begun for phase in trace.phases] + [one.begun for one in trace.attempts])
    for number, phase in enumerate(trace.phases):
        if phase.name == DELIVER:
            ended = request.ended
        else:
            after = trace.phases[number + 1].begun if number + 1 < len(trace.phases) else request.ended
            ended = next((one.begun for one in trace.attempts if phase.begun <= one.begun <= after), after)
        name, times = phase.name, _times(trace, phase.begun, ended)
        span = Span(trace.trace_id, trace.phase_id(number), trace.span_id, name, *times)
        if name == ADMIT and request.placement.queued_s:
            span.attributes["warmroute.queued_s"] = request.placement.queued_s
        elif name == CHOOSE and (choice := next(choices, None)):
            span.attributes = _decision(choice)
        last = number == len(trace.phases) - 1 and begins[-1] == phase.begun
        if last and request.code and phase.name != DELIVER:  # the phase that refused it
            span.attributes["error.type"] = request.code
            span.error = "" if request.status >= 500 else None
        spans.append(span)
    return spans


def _decision(choice: Choice) -> dict[str, Value]:
    decision = choice.decision
    best = decision.best
    found: dict[str, Value] = {
        "warmroute.pool": choice.pool,
        "warmroute.policy": choice.policy,
        "warmroute.reason": decision.reason,
        "warmroute.replica": best.replica,
        "warmroute.prompt_tokens.estimated": decision.prompt_tokens,
        "warmroute.cached_tokens.predicted": best.matched_tokens,
        "warmroute.cached_tokens.available": decision.available_tokens,
        "warmroute.cost_s": best.cost.total_s,
        "warmroute.cost.queue_s": best.cost.queue_s,
        "warmroute.cost.prefill_s": best.cost.prefill_s,
        "warmroute.candidates": choice.candidates,
        "warmroute.candidates.replica": [one.replica for one in choice.shown],
        "warmroute.candidates.cost_s": [one.cost.total_s for one in choice.shown],
        "warmroute.candidates.cached_tokens": [one.matched_tokens for one in choice.shown],
    }
    if decision.promise:
        found["warmroute.promise"] = decision.promise
    return found


def _attempt(attempt: Attempt, request: SettledRequest, trace: Trace) -> Span:
    ended = request.ended if attempt.ended is None else attempt.ended
    span = Span(trace.trace_id, attempt.span_id, trace.span_id, "attempt", *_times(trace, attempt.begun, ended))
    parts = urlsplit(attempt.url)
    span.kind = CLIENT
    span.attributes = {
        "server.address": (parts.hostname or "")[:MAX_CHARS],
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "warmroute.replica": attempt.replica,
        "warmroute.engine": attempt.engine,
    }
    if attempt.resumes:
        span.attributes["warmroute.resumes"] = True
    if attempt.failure:
        span.error = attempt.text[:MAX_TEXT]
        span.attributes["error.type"] = attempt.failure
    elif attempt is trace.attempts[-1] and request.answer.answered:
        span.attributes["http.response.status_code"] = request.answer.answered
        if request.answer.answered >= 400:
            span.error = ""
            span.attributes["error.type"] = str(request.answer.answered)
    return span


def _times(trace: Trace, begun: float, ended: float) -> tuple[int, int]:
    """Begin and end in Unix nanoseconds; the end is not before the begin."""
    first = trace.origin_ns + int(begun * 1e9)
    return first, max(first, trace.origin_ns + int(ended * 1e9))
