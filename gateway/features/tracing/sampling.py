"""Sampling: decides which requests are traced, at their start.

    valid traceparent ─────┬─ tracing.follow_parents ──► by its flag
                           └─ else: if its flag is set, the share `tracing.sample`, by its trace id
    none, or not valid ──────► the share `tracing.sample`, in a new trace

The trace id decides, so that gateways that see the same trace decide alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from gateway.config.live import Live
from gateway.features.tracing.context import HEADER, SAMPLED, TraceParent, parse_traceparent
from gateway.features.tracing.section import TRACING, TracingConfig
from gateway.features.tracing.trace import ROOT_BITS, Trace
from gateway.request.client import ClientRequest

_IDS: Final = 1 << 64  # values of the deciding half of a trace id
_RANDOM: Final = 2  # flag: the trace id is random; forwarded


class Tracer:
    """Starts traces. wall_clock: Unix seconds. chance: source of ids, which need not be secret."""

    def __init__(self, live: Live, chance: random.Random, wall_clock: Callable[[], float]) -> None:
        self._live = live
        self._chance = chance
        self._wall_clock = wall_clock

    @property
    def _config(self) -> TracingConfig:
        """The section in force now."""
        return TRACING.of(self._live.config)

    def begin(self, request: ClientRequest, now: float) -> Trace | None:
        """Start a trace; None: the request is not traced. now: time of the gateway's clock."""
        header = request.headers.get(HEADER)
        parent = parse_traceparent(header) if header else None
        if parent is None:
            return self._trace(None, request, now) if self._chance.random() < self._config.sample else None
        return self._trace(parent, request, now) if parent.sampled and self._samples(parent) else None

    def within(self, outer: Trace, request: ClientRequest, now: float) -> Trace:
        """The trace of a request that is made for a traced one."""
        trace = self._trace(TraceParent(outer.trace_id, outer.span_id, outer.flags), request, now)
        trace.remote, trace.keeps_state = False, outer.keeps_state
        trace.origin_ns = outer.origin_ns  # one clock for one trace: its spans are in order
        return trace

    def _samples(self, parent: TraceParent) -> bool:
        return self._config.follow_parents or int(parent.trace_id[16:], 16) < self._config.sample * _IDS

    def _trace(self, parent: TraceParent | None, request: ClientRequest, now: float) -> Trace:
        root = self._chance.getrandbits(ROOT_BITS) or 1
        trace_id = parent.trace_id if parent else f"{self._chance.getrandbits(128) or 1:032x}"
        origin_ns = int(self._wall_clock() * 1e9) - int(now * 1e9)
        trace = Trace(trace_id, parent.span_id if parent else "", root, request.method, origin_ns)
        if parent is not None:
            trace.flags = SAMPLED | (parent.flags & _RANDOM)
        return trace

    def __repr__(self) -> str:
        return f"<Tracer of {self._config.sample:g} of the requests>"
