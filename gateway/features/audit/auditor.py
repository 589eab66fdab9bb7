"""Feeds the audit with answers, and acts on its findings.

    chosen ──► SentPrompts ──► delivered ──► Audit.observe        sweep ──► Audit.judge ──► metric, log, row of the replica,
                                                                                            Router.doubt, the meter

Every prompt is remembered, but only so many answers a second are compared, because more would show nothing new.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Final

from gateway.features.audit.audit import CACHED_UNSENT, DISTRUSTED, PROMPT_EXCESS, TOO_FAST, Audit
from gateway.features.audit.claim import AnswerClaim
from gateway.features.audit.metrics import AuditMetrics
from gateway.features.audit.sent import SentPrompts
from gateway.fleet.directory import Fleet
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.request.slots import Slot
from router import Booking, Router

log = logging.getLogger("warmroute.audit")

PER_SECOND: Final = 20  # answers
JUDGED_S: Final = 5.0  # between two judgements
# A replica may hold prompts of the time before the gateway began, if it is older; after this time few of them are left.
GRACE_S: Final = 3600.0

_SENT: Final = Slot[tuple[str, int]]("audit")


class Auditor:
    """The audit of one process. now: Unix seconds, as engines report their start."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        metrics: AuditMetrics,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._clock = clock
        self._begun, self._begun_at = clock(), now()
        self.complete_from = self._begun + GRACE_S  # from then on every prompt that a replica may hold is known
        self._audit, self._sent = Audit(), SentPrompts()
        self._left = PER_SECOND
        self._judged = self._begun
        self._processes: dict[str, tuple[float, float | None]] = {}  # by replica: signs of its process
        self._found: dict[str, frozenset[str]] = {}

    # -- requests

    def chosen(self, exchange: Exchange, _live: Collection[str], _now: float) -> None:
        """The prompt is sent to a replica."""
        record = exchange.record
        if record.subject.metered:
            booking = exchange.booking
            blocks = self._sent.send(booking.lease.replica, booking.prompt.keys)
            if self._left > 0 and record.subject.countable:
                self._left -= 1
                _SENT.set(record, (booking.lease.replica, blocks))

    def followed(self, booking: Booking) -> None:
        """Another process has sent a prompt to a replica."""
        self._sent.send(booking.lease.replica, booking.prompt.keys)

    def delivered(self, exchange: Exchange) -> None:
        """The answer was sent."""
        booking, record, attempts, delivered = exchange.booking, exchange.record, exchange.attempts, exchange.delivered
        name = booking.lease.replica
        if attempts.failed and record.subject.metered:  # it may have moved to another replica
            self._sent.send(name, booking.prompt.keys)
        sent = _SENT.get(record)
        if (
            sent is None
            or sent[0] != name
            or exchange.prefilled is not None
            or delivered.resumed
            or delivered.status != 200
            or not record.answer.complete
        ):
            return
        state = self._fleet.named(name)
        if state is None:
            return
        prompt, usage = booking.prompt, delivered.usage
        claim = AnswerClaim(prompt.keys, prompt.units, prompt.block_units, prompt.scale, prompt.origin, usage)
        claim.images, claim.size = exchange.api.images, max(prompt.units, exchange.body_size)
        claim.prefill_s = booking.lease.prefill_s
        if record.subject.stream and delivered.last_byte is not None:
            first = delivered.first_token
            claim.passed = 0 if first is None else delivered.passed
            claim.decode_s = None if first is None else delivered.last_byte - first
        if usage is not None and prompt.units and self._knows_all(state):
            claim.sent = int((sent[1] + 1) * prompt.block_units * usage.prompt / prompt.units)
        self._audit.observe(name, state.member.pool, claim)

    def _knows_all(self, state: ReplicaState) -> bool:
        """True if the replica holds nothing of the time before this process."""
        young = state.began_after(self._begun) or (state.started is not None and state.started > self._begun_at)
        return young or self._clock() >= self.complete_from

    # -- findings

    def sweep(self, now: float) -> None:
        """To be called every second."""
        self._left = PER_SECOND
        for name, findings in self._found.items():
            if findings & TOO_FAST:
                self._router.came_up(name, now)
        if now - self._judged < JUDGED_S:
            return
        self._judged = now
        self.judge()

    def judge(self) -> None:
        """Find and apply the present findings. O(replicas log replicas)."""
        for name in self._audit.replicas:
            state = self._fleet.named(name)
            process = None if state is None else (state.up_since, state.started)
            if process != self._processes.setdefault(name, process or (0.0, None)):
                self._audit.forget(name)
                del self._processes[name]
        self._apply(self._audit.judge())

    def _apply(self, found: dict[str, frozenset[str]]) -> None:
        """Apply the present findings."""
        if not (found or self._found):
            return
        for name in (*found, *(each for each in self._found if each not in found)):
            new, old = found.get(name, frozenset()), self._found.get(name, frozenset())
            if new == old:
                continue
            state = self._fleet.named(name)
            for finding in sorted(new - old):
                self._metrics.findings.set((name, finding), 1)
                log.warning("a replica's answers contradict each other", extra={"replica": name, "finding": finding})
            for finding in sorted(old - new):
                self._metrics.findings.set((name, finding), 0 if state else None)
                log.info("a finding of the audit has ended", extra={"replica": name, "finding": finding})
            if state is not None:
                state.findings = new
                state.miscounts_cached, state.miscounts_prompts = CACHED_UNSENT in new, PROMPT_EXCESS in new
        self._found = found
        self._router.doubt({name for name, findings in found.items() if findings & DISTRUSTED})

    def __repr__(self) -> str:
        return f"<Auditor, {self._audit!r}, findings about {len(self._found)}>"
