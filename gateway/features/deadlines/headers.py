"""The headers in which clients say how long a request may take. Pure."""

from __future__ import annotations

import re
from typing import Final

from gateway.errors import GatewayError, bad_request
from gateway.request.client import Headers

TIMEOUT_HEADER: Final = "X-Request-Timeout"
QUEUE_HEADER: Final = "X-Llm-D-Inference-Ttl"  # of llm-d: for the wait in the queue only
LONGEST_S: Final = 86_400.0

_SECONDS: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,20})?", re.ASCII)  # also as a program prints a difference of times
_PART: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def has_times(headers: Headers) -> bool:
    """True if a client has sent one of them."""
    return headers.get(TIMEOUT_HEADER) is not None or headers.get(QUEUE_HEADER) is not None


def timeout_of(header: str) -> float:
    """The seconds of TIMEOUT_HEADER. Raises GatewayError 400 unless it is a number above 0, and at most LONGEST_S."""
    text = header.strip()
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= LONGEST_S:
        wanted = f"a number of seconds above 0, and at most {LONGEST_S:.0f}"
        raise invalid(f"{TIMEOUT_HEADER} is {header[:40]!r}; it must be {wanted}.")
    return seconds


def invalid(message: str) -> GatewayError:
    return bad_request(message, param=TIMEOUT_HEADER, code="invalid_timeout")


def queue_time_of(header: str) -> float | None:
    """The seconds of QUEUE_HEADER, a duration as Go writes it ("1m30s", "1500ms"). None: it is not above 0, or none."""
    text, at, seconds = header.strip(), 0, 0.0
    for match in _PART.finditer(text):
        if match.start() != at:
            return None
        at, seconds = match.end(), seconds + float(match[1]) * _UNITS[match[2]]
    return seconds if text and at == len(text) and seconds > 0 else None
