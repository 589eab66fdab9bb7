"""Replays a recorded or generated workload through a contestant, to measure memory: nothing is timed.

The fleet is that of `traffic.py` (prefill first come, first served, at PREFILL_RATE); requests and lengths of answers are the
workload's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.router.traffic import PREFILL_RATE
from router.simulation.workloads import OpenLoop, SimulatedRequest, WorkloadSource
from router.types import Prompt

DECODE_RATE = 50.0  # tokens per second of a sequence


class Replay:
    """prepare: converts a prompt before the decision. sent: requests so far."""

    def __init__(self, contestant: Any, source: WorkloadSource, prepare: Callable[[Prompt], Prompt]) -> None:
        self._contestant = contestant
        self._source = source
        self._prepare = prepare
        self._last = len(source) if isinstance(source, OpenLoop) else 0
        self._free: dict[str, float] = {}  # when a replica has prefilled all that it was sent
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self.sent = 0
        for at, request in source.begin():
            self._push(at, partial(self._decide, request))

    def step(self) -> bool:
        """Let the next thing happen. False if there is none, or if an open loop's last request is on its way."""
        if not self._due or (self._last and self.sent == self._last):
            return False
        at, _, happen = heapq.heappop(self._due)
        happen(at)
        return True

    def _push(self, at: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), happen))

    def _decide(self, request: SimulatedRequest, now: float) -> None:
        ticket = self._contestant.decide(self._prepare(request.prompt), now)
        self.sent += 1
        replica, _, uncached = self._contestant.work(ticket)
        self._free[replica] = first = max(now, self._free.get(replica, 0.0)) + uncached / PREFILL_RATE
        self._push(first, partial(self._answer, request, ticket))

    def _answer(self, request: SimulatedRequest, ticket: Any, now: float) -> None:
        self._contestant.first_token(ticket, now)
        self._push(now + request.output_tokens / DECODE_RATE, partial(self._end, request, ticket))

    def _end(self, request: SimulatedRequest, ticket: Any, now: float) -> None:
        self._contestant.close(ticket, now)
        if arrival := self._source.after(request, now):
            at, following = arrival
            self._push(at, partial(self._decide, following))
