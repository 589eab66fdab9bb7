"""What happened to one request: collected on its way, counted and logged once at its end."""

from __future__ import annotations

import itertools
import logging
import random
import re
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from gateway.metering import Bill, Usage
from gateway.metrics import Metrics
from gateway.plain import PlainRequest
from gateway.request_log import RequestLog
from router import Candidate

CLIENT_LEFT: Final = 499  # nginx's status for it; never sent
UNKNOWN: Final = "unknown"
TENANT_HEADER: Final = "X-Tenant-Id"
# An id has to differ from all others, not to be a secret.
_BEGIN: Final = f"{random.SystemRandom().getrandbits(96):024x}"
_numbers = itertools.count(1)
_UNSAFE: Final = re.compile(r"[^ -~]")
_SAFE_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# A replica may answer with any of 900 codes: those that no standard knows are counted by their class.
_CODES: Final = {status.value: str(status.value) for status in HTTPStatus} | {CLIENT_LEFT: str(CLIENT_LEFT)}


def code_label(status: int) -> str:
    """A status as a label: "503", or the class of one that no standard knows: "5xx"."""
    return _CODES.get(status) or f"{status // 100}xx"


def request_id(offered: str | None) -> str:
    """The client's x-request-id if it can stand in a log and a header, else a new one."""
    if offered and _SAFE_ID.fullmatch(offered):
        return offered
    return f"wr-{_BEGIN}-{next(_numbers)}"


def tenant(header: str | None) -> str:
    """The tenant header as it can stand in a log and a label: printable ASCII, not too long."""
    return _UNSAFE.sub("?", header)[:64] if header else "none"


class Record:
    """Times are readings of the gateway's clock, in seconds; None: it did not come to that."""

    model = ""
    label = UNKNOWN  # the model's bounded name for metrics
    replica = ""
    reason = ""
    status = 500
    stream = False
    estimated_prompt_tokens = 0
    predicted_cached_tokens = 0
    first_byte: float | None = None
    last_byte: float | None = None
    usage: Usage | None = None
    bill: Bill | None = None
    error = ""
    told = False  # the stream's [DONE] went out: who leaves then has everything
    resumed = 0  # how often another replica went on with it after its first byte

    def __init__(self, name: str, path: str, begun: float, tenant: str) -> None:
        self.id = name
        self.path = path
        self.begun = begun
        self.tenant = tenant
        self.failed_attempts: list[dict[str, str]] = []

    def chose(self, candidate: Candidate) -> None:
        self.replica = candidate.replica
        self.predicted_cached_tokens = candidate.matched_tokens

    def attempt_failed(self, replica: str, reason: str, error: str) -> None:
        self.failed_attempts.append({"replica": replica, "reason": reason, "error": error})

    def finish(self, metrics: Metrics, log: RequestLog, now: float) -> None:
        """Count the request and write its log line."""
        metrics.requests.add((self.label, code_label(self.status)))
        metrics.request_seconds.observe((self.label,), now - self.begun)
        if self.first_byte is not None:
            cache = "hit" if self.predicted_cached_tokens else "miss"
            metrics.ttft_seconds.observe((self.label, cache), self.first_byte - self.begun)
            if self.usage and self.usage.completion > 1 and self.last_byte is not None:
                gap = (self.last_byte - self.first_byte) / (self.usage.completion - 1)
                metrics.inter_token_seconds.observe((self.label,), gap)
        broken = self.status < 400 and self.error  # after the status had gone out
        log.write(logging.WARNING if broken or self.status >= 500 else logging.INFO, self._line(now))

    def _line(self, now: float) -> dict[str, Any]:
        usage, bill = self.usage, self.bill
        line = {
            "id": self.id,
            "path": self.path,
            "model": self.model[:100],
            "tenant": self.tenant,
            "replica": self.replica,
            "reason": self.reason,
            "status": self.status,
            "stream": self.stream,
            "ttft_s": None if self.first_byte is None else round(self.first_byte - self.begun, 6),
            "seconds": round(now - self.begun, 6),
            "prompt_tokens": usage.prompt if usage else None,
            "estimated_prompt_tokens": self.estimated_prompt_tokens,
            "cached_tokens_predicted": self.predicted_cached_tokens,
            "cached_tokens_reported": usage.cached if usage else None,
            "completion_tokens": usage.completion if usage else None,
            "cost_usd": round(bill.total, 9) if bill else None,
            "saved_usd": round(bill.saved, 9) if bill else None,
        }
        if self.resumed:
            line["resumed"] = self.resumed
        if self.failed_attempts:
            line["failed_attempts"] = self.failed_attempts
        if self.error:
            line["error"] = self.error
        return line


def begin(request: web.Request | PlainRequest, now: float) -> Record:
    headers, path = request.headers, request.raw_path
    if "%" in path or "?" in path or not path.startswith("/"):
        path = request.path
    return Record(request_id(headers.get("X-Request-Id")), path, now, tenant(headers.get(TENANT_HEADER)))
