"""The log: one line for every request."""

from __future__ import annotations

import logging
from typing import Any

from gateway.accounting.consumed import CACHED, TOKENS, Consumed
from gateway.accounting.money import dollars
from gateway.request.record import SettledRequest
from gateway.telemetry.request_log import RequestLog


class AccessLog:
    """Writes one line for every request."""

    def __init__(self, requests: RequestLog) -> None:
        self._requests = requests

    def __call__(self, request: SettledRequest) -> None:
        broken = request.status < 400 and request.error  # after the status had gone out
        level = logging.WARNING if broken or request.status >= 500 else logging.INFO
        line = _line(request)
        if request.key:
            line["key"] = request.key
        if request.client:
            line["client"] = request.client
        self._requests.write(level, line)


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


def _waited_and_noted(request: SettledRequest) -> dict[str, Any]:
    """What few requests have."""
    waited = {"queued_s": _microseconds(request.queued_s)} if request.queued_s else {}
    return {**waited, **(request.fields or {})}


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
    if request.queued_s or request.fields:
        line |= _waited_and_noted(request)
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
