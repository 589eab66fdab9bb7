"""Savings against other policies, since the start and today: tokens, GPU-seconds, USD.

For each policy of `counterfactual.py`, and for DELIVERED (as reported by the engines), there are sums of cached tokens, of the
seconds of their prefill, and of their price. The savings against a policy are ACTUAL minus that policy, because the shadows'
errors affect both. The error is the difference between ACTUAL and DELIVERED.

A day is a UTC day. now: Unix seconds. If the clock jumps to another day, a new day begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gateway.accounting.money import dollars
from gateway.features.savings.counterfactual import ACTUAL, POLICIES
from gateway.features.savings.metrics import SavingsMetrics

DELIVERED: Final = "delivered"
_DAY_S: Final = 86400
_ALL: Final = (*POLICIES, DELIVERED)
_OTHERS: Final = tuple(each for each in POLICIES if each != ACTUAL)


class Savings:
    """The sums of one process."""

    def __init__(self, metrics: SavingsMetrics, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self._day = 0
        self._prompt = 0.0  # prompt tokens of today's answers with reported cached tokens
        self._tokens = dict.fromkeys(_ALL, 0.0)
        self._seconds = dict.fromkeys(_ALL, 0.0)
        self._dollars = dict.fromkeys(_ALL, 0.0)

    def add(self, prompt: int, delivered: int, cached: Sequence[float], token_s: float, token_savings: int) -> None:
        """Adds one answer. cached: tokens under each of POLICIES. token_s: seconds of prefill per token at its replica.
        token_savings: picodollars saved per cached token.
        """
        self.turn()
        metrics = self._metrics
        metrics.compared_tokens.add((), prompt)
        self._prompt += prompt
        for policy, tokens in zip(_ALL, (*cached, delivered), strict=True):
            metrics.policy_cached_tokens.add((policy,), tokens)
            self._tokens[policy] += tokens
            self._seconds[policy] += tokens * token_s
            self._dollars[policy] += dollars(round(tokens * token_savings))

    def turn(self) -> None:
        """Begins a new day if the date has changed."""
        day = int(self._now() // _DAY_S)
        if day != self._day:
            self._day, self._prompt = day, 0.0
            for sums in (self._tokens, self._seconds, self._dollars):
                sums.update(dict.fromkeys(_ALL, 0.0))

    def set_gauges(self) -> None:
        """To be called before the metrics are read."""
        self.turn()
        metrics = self._metrics
        metrics.compared_today.set((), self._prompt)
        for policy in _OTHERS:
            metrics.saved_tokens_today.set((policy,), self._tokens[ACTUAL] - self._tokens[policy])
            metrics.saved_seconds_today.set((policy,), self._seconds[ACTUAL] - self._seconds[policy])
            metrics.saved_usd_today.set((policy,), self._dollars[ACTUAL] - self._dollars[policy])
        metrics.saved_error_today.set((), self._tokens[DELIVERED] - self._tokens[ACTUAL])

    def __repr__(self) -> str:
        return f"<Savings of {self._prompt:.0f} tokens today>"
