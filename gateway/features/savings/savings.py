"""What the choice of replicas has saved against other policies, since the gateway's start and today: tokens, GPU-seconds, USD.

For each policy of `counterfactual.py`, and for DELIVERED (what the engines have reported), sums of cached tokens, of the
seconds that they would have taken, and of what they are worth. What routing has saved against a policy is ACTUAL less that
policy, for what shadows get wrong they get wrong for both; the error is how far ACTUAL is from DELIVERED.

A day is of UTC. now: Unix seconds; a clock that jumps begins a new day, or goes on with this one.
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
    """See the top of this file."""

    def __init__(self, metrics: SavingsMetrics, now: Callable[[], float]) -> None:
        self._metrics = metrics
        self._now = now
        self._day = 0
        self._prompt = 0.0  # tokens of today, in the answers whose cached tokens were reported
        self._tokens = dict.fromkeys(_ALL, 0.0)
        self._seconds = dict.fromkeys(_ALL, 0.0)
        self._dollars = dict.fromkeys(_ALL, 0.0)

    def add(self, prompt: int, delivered: int, cached: Sequence[float], token_s: float, token_savings: int) -> None:
        """One answer. cached: tokens under each of POLICIES. token_s: seconds of prefill for a token, where it was sent;
        token_savings: picodollars that a cached one saves.
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
        """Begin the day that it is."""
        day = int(self._now() // _DAY_S)
        if day != self._day:
            self._day, self._prompt = day, 0.0
            for sums in (self._tokens, self._seconds, self._dollars):
                sums.update(dict.fromkeys(_ALL, 0.0))

    def set_gauges(self) -> None:
        """Before the metrics are read."""
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
