"""What a gateway does with a request for the sake of money and numbers, part by part, on real records; run by `path.py`.

Reads lines "PART COUNT", does that part for so many requests, and writes the nanoseconds of CPU that this took.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from gateway.accounting.consumed import Consumed
from gateway.accounting.meter import Meter
from gateway.config.live import Live
from gateway.config.schema import LedgerConfig
from gateway.config.source import load
from gateway.dialects.usage import Usage
from gateway.features.keys.grant import Grant
from gateway.features.keys.limits.account import Limits
from gateway.features.keys.limits.calendar import Calendar
from gateway.features.keys.limits.limiter import Limiter, Moment
from gateway.features.keys.ring import KeyRing
from gateway.features.keys.secret import digest_of, new_key
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import Ledger
from gateway.request.record import SettledRequest
from gateway.request.settle import Metering, RequestMetrics
from gateway.telemetry.metrics import Metrics
from router import Booking, Prompt, Replica, Router

MODEL: Final = "qwen3-coder-30b"
TENANTS: Final = 20
KEYS: Final = 1_000
_PROMPT, _CACHED, _OUTPUT = 1_200, 900, 150  # tokens
_MONEY: Final = 10**12  # picodollars that a request reserves at most
_NAME: Final = "10.0.0.1:8000"

Part = Callable[[list[SettledRequest]], None]


def records(count: int) -> list[SettledRequest]:
    """Streamed chats that have ended, with their bookings, and without a bill."""
    booking, found = _booking(), list[SettledRequest]()
    for number in range(count):
        made = SettledRequest(f"wr-0123456789abcdef-{number}", "/v1/chat/completions", 1.0)
        made.subject.label = made.subject.model = MODEL
        made.sender.tenant, made.placement.pool, made.placement.replica = f"tenant-{number % TENANTS}", "default", _NAME
        made.status = made.answer.answered = 200
        made.answer.complete = made.answer.ok = True
        subject = made.subject
        subject.stream = subject.generates = subject.metered = subject.countable = True
        made.answer.first_byte, made.answer.last_byte, made.ended = 1.2, 3.4, 3.5
        made.placement.predicted_cached_tokens, made.placement.available_cached_tokens = _CACHED, _CACHED + 50
        made.spent.usage = Usage(_PROMPT, _OUTPUT, _CACHED)
        made.spent.consumed = Consumed(made.spent.usage)
        made.booking = booking
        found.append(made)
    return found


def _booking() -> Booking:
    router = Router(policy="cost", ttl_s=900.0, memory_bytes=1 << 26, chance=random.Random(0))
    router.add(Replica(_NAME))
    return router.choose(Prompt(random.Random(1).randbytes(8 * 16), 4_800, 256, MODEL), [_NAME], 0.0)


def meter_of(metrics: Metrics, *, priced: bool) -> Meter:
    prices = {MODEL: {"input": 0.3, "output": 1.5, "cached_input": 0.03}} if priced else {}
    config = load(None, {"pools": [{"replicas": [f"http://{_NAME}"]}], "prices": prices}, env={})
    return Meter(Live(config), metrics, time.time)


class Limited:
    """Requests with keys: found by their digest, with limits per minute and budgets, reserved for and settled."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._ring = KeyRing()
        self._limiter = Limiter()
        self._calendar = Calendar()
        self._keys = [new_key(f"k{number:07}") for number in range(KEYS)]
        limits = Limits(10**9, 10**12, 10**18, 10**18)
        for number, key in enumerate(self._keys):
            grant = Grant(key[3:11], f"tenant-{number % TENANTS}", limits=limits)
            self._ring.put(grant, ((digest_of(key), 0.0),))

    def __call__(self, requests: list[SettledRequest]) -> None:
        for number, request in enumerate(requests):
            grant = self._ring.find(digest_of(self._keys[number % KEYS]), time.time())
            if grant is None or grant.limits is None:
                raise RuntimeError("the key is not known")
            grant.require_valid(time.time())
            reservation = self._limiter.enter(grant.id, grant.limits, self._moment())
            bill = self._meter.bill(request.subject.model, Consumed(Usage(_PROMPT, reservation.output, _CACHED)))
            reservation.expect(_PROMPT - _CACHED, min(_MONEY, bill.total) if bill else 0, self._moment())
            spent = request.spent.bill.total if request.spent.bill is not None else 0
            reservation.settle(_PROMPT - _CACHED, _OUTPUT, spent, self._moment())

    def _moment(self) -> Moment:
        return self._calendar.moment(time.monotonic(), time.time())


def nothing(requests: list[SettledRequest]) -> None:
    for _ in requests:
        pass


def observing(observe: Callable[[SettledRequest], None]) -> Part:
    def run(requests: list[SettledRequest]) -> None:
        for request in requests:
            observe(request)

    return run


def in_turn(*parts: Part) -> Part:
    def run(requests: list[SettledRequest]) -> None:
        for part in parts:
            part(requests)

    return run


def parts() -> Mapping[str, Part]:
    metrics = Metrics()
    numbers = observing(RequestMetrics(metrics))
    plain = observing(Metering(meter_of(metrics, priced=False), metrics))
    priced = meter_of(metrics, priced=True)
    metering = observing(Metering(priced, metrics))
    keys = Limited(priced)
    ledger = Ledger(LedgerConfig(url="sqlite:///never", buffer_mb=4096), metrics, time.time, time.monotonic)
    entries = observing(LedgerEntries(ledger))
    return {
        "nothing": nothing,
        "metrics": numbers,
        "tokens": plain,
        "metering": metering,
        "keys": keys,
        "ledger": entries,
        "off": in_turn(numbers, plain),
        "on": in_turn(numbers, metering, keys, entries),
    }


def main() -> None:
    known = parts()
    print(" ".join(known), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        some = records(int(count))
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.thread_time_ns()
        known[name](some)
        print(time.thread_time_ns() - begun, flush=True)


if __name__ == "__main__":
    main()
