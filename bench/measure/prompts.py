"""Requests of the load generator, and their times."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

HEAD = "You are a helpful assistant. " * 20  # of every prompt
_NUMBER = b"%011d "
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Requests:
    """Complete requests, each with a distinct user turn after the same head, all of one length."""

    def __init__(self, size: int, chunks: int) -> None:
        streamed = {"stream": True, "max_tokens": chunks} if chunks else {}
        messages = [{"role": "system", "content": HEAD}, {"role": "user", "content": "@"}]
        text = json.dumps({"model": "m", "messages": messages, **streamed}, separators=(",", ":")).encode()
        self._times = max(1, (size - len(text)) // len(_NUMBER % 0))
        begin, _, self._end = text.partition(b"@")
        length = len(begin) + len(_NUMBER % 0) * self._times + len(self._end)
        self._begin = _HEAD % length + begin
        # Turns are distinct between the runs of a benchmark, too, which a gateway sees one after the other.
        self._next = time.time_ns() // 1000 % 10**11

    def __iter__(self) -> Requests:
        return self

    def __next__(self) -> bytes:
        self._next += 1
        return b"%s%s%s" % (self._begin, (_NUMBER % self._next) * self._times, self._end)


def arrivals(rate: float, seconds: float, chance: random.Random | None) -> Iterator[float]:
    """Times of a Poisson process, or evenly spaced ones where there is no chance."""
    at, number = 0.0, 0
    while rate > 0:
        number += 1
        at = at + chance.expovariate(rate) if chance else number / rate
        if at > seconds + 1e-9:
            return
        yield at
