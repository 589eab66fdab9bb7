"""The log: one line for every request."""

from __future__ import annotations

import logging
from typing import Any, Final

from gateway.accounting.consumed import CACHED, TOKENS, Consumption
from gateway.accounting.money import dollars
from gateway.admission.pool_queue import OVERLOADED, QUEUE_TIMEOUT
from gateway.request.record import SettledRequest
from gateway.telemetry.request_log import RequestLog

OVERLOADS: Final = frozenset([OVERLOADED, QUEUE_TIMEOUT])  # codes of 429 that are no client's fault


class AccessLog:
    """Writes one line for every request."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests

    def __call__(self, request: SettledRequest) -> None:
        broken = request.status < 400 and request.error  # an error after the status was sent
        ours = request.status >= 500 or request.code in OVERLOADS
        line, sender = _line(request), request.sender
        if request.code:
            line["code"] = request.code
        if sender.key:
            line["key"] = sender.key
        if sender.session:
            line["session"] = sender.session
        if sender.agent:
            line["agent"] = sender.agent
        if sender.parent:
            line["parent"] = sender.parent
        if sender.client:
            line["client"] = sender.client
        if sender.user_agent:
            line["user_agent"] = sender.user_agent
        level = logging.WARNING if broken or ours else logging.INFO
        self._requests.write(level, line)


def _microseconds(seconds: float) -> float:
    """Seconds rounded to microseconds; not negative. `round` would convert to decimal text and back, a hundred times as
    slow.
    """
    return int(seconds * 1e6 + 0.5) / 1e6


def _estimates(used: Consumption) -> dict[str, Any]:
    """Counts that the engine did not report. Predicted cached tokens have their own field in the line."""
    line: dict[str, Any] = {"estimated": used.estimated}
    if used.estimated == TOKENS:
        line["prompt_tokens"] = used.usage.prompt
    if used.estimated != CACHED:
        line["completion_tokens"] = used.usage.completion
    return line


def _waited_and_noted(request: SettledRequest) -> dict[str, Any]:
    """Fields that few requests have."""
    waited = {"queued_s": _microseconds(request.placement.queued_s)} if request.placement.queued_s else {}
    held = {"held_s": _microseconds(request.placement.held_s)} if request.placement.held_s else {}
    prefilled = {"prefiller": request.placement.prefiller} if request.placement.prefiller else {}
    sent = {"sent_id": request.sent_id} if request.sent_id else {}
    pulses = {"pulses": request.answer.pulses} if request.answer.pulses else {}
    return {**sent, **waited, **held, **prefilled, **pulses, **(request.fields or {})}


def _line(request: SettledRequest) -> dict[str, Any]:
    subject, placement, answer, spent = request.subject, request.placement, request.answer, request.spent
    usage, bill, used = spent.usage, spent.bill, spent.consumed
    line = {
        "id": request.id,
        "path": request.path,
        "model": subject.model[:100],
        "tenant": request.sender.tenant,
        "replica": placement.replica,
        "reason": placement.reason,
        "status": request.status,
        "stream": subject.stream,
        "ttft_s": None if answer.first_token is None else _microseconds(answer.first_token - request.begun),
        "seconds": _microseconds(request.ended - request.begun),
        "prompt_tokens": usage.prompt if usage else None,
        "estimated_prompt_tokens": placement.estimated_prompt_tokens,
        "cached_tokens_predicted": placement.predicted_cached_tokens,
        "cached_tokens_reported": usage.cached if usage else None,
        "completion_tokens": usage.completion if usage else None,
        "cost_usd": dollars(bill.total) if bill else None,
        "saved_usd": dollars(bill.saved) if bill else None,
    }
    if used and used.estimated:
        line |= _estimates(used)
    noted = answer.pulses or request.fields or request.sent_id
    if noted or placement.queued_s or placement.held_s or placement.prefiller:
        line |= _waited_and_noted(request)
    if usage and usage.written:
        line["cache_write_tokens"] = usage.written
    if request.breakpoint:
        line["breakpoint"] = request.breakpoint
    if answer.translated:
        line["translated"] = True
    if subject.alias:
        line["model_alias"] = subject.alias[:100]
    if placement.passed:
        line["fallback"] = " -> ".join((*placement.passed, placement.pool))
    if answer.resumed:
        line["resumed"] = answer.resumed
    if placement.failed_attempts:
        line["failed_attempts"] = placement.failed_attempts
    if request.cancelled:
        line["cancelled"] = True
    if request.error:
        line["error"] = request.error
    return line
