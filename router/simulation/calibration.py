"""Measures the replicas' speed in a recording, and its latencies and hits for comparison with a simulation.

An engine that computes one prompt at a time begins with a prompt when it arrives, or when the previous one is done, if that is
later. So for a request that found its replica idle, the time to its first token is a constant plus its uncached tokens over the
prefill rate: a straight line through these requests gives both. (Idle: every earlier request there had its first token.) With
fewer than LEAST of them, the rate is the sum of uncached tokens over the sum of times, and the constant 0. In a sample, a
replica that looks idle may have been busy with unrecorded requests: then the line goes through the faster half. The decode rate
is the tokens after the first one over the time after it, of all answers together.

Streams only: a plain answer does not show its first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from router.simulation.fleet import Result, quantile
from router.simulation.recorded import RecordedRequest

LEAST: Final = 20  # requests for a straight line
ROUNDS: Final = 10
MEASURED: Final = "measured"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second (decode: of a sequence), and the part of the first token's time that is no work of the replica, in
    seconds. None: the recording does not show it.
    """

    prefill_rate: float | None
    decode_rate: float | None
    latency_s: float


def speed_of(requests: Sequence[RecordedRequest], *, whole: bool = True) -> Speed:
    """The speed in a recording. requests: in order of time. whole: they are complete, not a sample."""
    waits = list(_waits(requests))
    idle = [(uncached, seconds) for uncached, seconds, free in waits if free]
    rate, latency = (_line(idle) if whole else _lower_line(idle)) if len(idle) >= LEAST else (None, 0.0)
    if rate is None:
        busy = sum(seconds for _, seconds, _ in waits)
        rate = sum(uncached for uncached, _, _ in waits) / busy if busy > 0 else None
    return Speed(rate or None, _decode_rate(requests), latency)


def _waits(requests: Sequence[RecordedRequest]) -> Iterable[tuple[int, float, bool]]:
    """(uncached tokens, seconds from the earliest begin of its prefill, True if its replica was idle) of each stream."""
    busy_until: dict[int, float] = {}
    for one in requests:
        if one.status >= 400:
            continue
        done = one.at + (one.seconds if one.ttft is None else one.ttft)
        before = busy_until.get(one.replica, 0.0)
        busy_until[one.replica] = max(before, done)
        if one.ttft is not None and one.cached is not None and done > before:
            yield one.tokens - one.cached, done - max(before, one.at), before <= one.at


def _lower_line(points: Sequence[tuple[int, float]]) -> tuple[float | None, float]:
    """A line through the points below the previous line's middle, repeated a few times."""
    chosen = points
    for _ in range(ROUNDS):
        rate, constant = _line(chosen)
        if rate is None:
            break
        off = sorted((seconds - constant - tokens / rate, tokens, seconds) for tokens, seconds in points)
        chosen = [(tokens, seconds) for _, tokens, seconds in off[: len(off) // 2]]
    return _line(chosen)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float | None, float]:
    """Rate and constant of the least squares: seconds = constant + tokens / rate. (None, 0): there is no such line."""
    count = len(points)
    tokens, seconds = sum(one for one, _ in points) / count, sum(one for _, one in points) / count
    spread = sum((one - tokens) ** 2 for one, _ in points)
    slope = sum((one - tokens) * (each - seconds) for one, each in points) / spread if spread else 0.0
    if slope <= 0:
        return None, 0.0
    constant = seconds - slope * tokens
    return (1 / slope, constant) if constant >= 0 else (tokens / seconds, 0.0)


def _decode_rate(requests: Iterable[RecordedRequest]) -> float | None:
    tokens, seconds = 0, 0.0
    for one in requests:
        if one.status < 400 and one.ttft is not None and one.output and one.output > 1 and one.seconds > one.ttft:
            tokens += one.output - 1
            seconds += one.seconds - one.ttft
    return tokens / seconds if seconds > 0 else None


def measured(requests: Sequence[RecordedRequest], replicas: int, kv_tokens: int, since: float = 0.0) -> Result | None:
    """The recorded result: hits of prompts with reported cached tokens, waits of streams; None: there is neither.

    since: earlier requests are ignored.
    """
    told = [one for one in requests if one.cached is not None and one.at >= since]
    streams = [one for one in requests if one.ttft is not None and one.at >= since]
    waits = sorted(one.ttft or 0.0 for one in streams)
    if not told or not waits:
        return None
    work: dict[int, int] = {}
    for one in told:
        work[one.replica] = work.get(one.replica, 0) + one.tokens - (one.cached or 0)
    return Result(
        policy=MEASURED,
        replicas=replicas,
        kv_tokens=kv_tokens,
        requests=len(requests),
        hit_ratio=sum(one.cached or 0 for one in told) / max(1, sum(one.tokens for one in told)),
        ttft_mean_s=sum(waits) / len(waits),
        ttft_p50_s=quantile(waits, 0.50),
        ttft_p90_s=quantile(waits, 0.90),
        ttft_p99_s=quantile(waits, 0.99),
        e2e_mean_s=sum(one.seconds for one in streams) / len(streams),
        load_skew=max(work.values()) * max(replicas, len(work)) / (sum(work.values()) or 1),
    )
