"""The audit: compares the claims of replicas with bounds that the gateway knows. Pure.

    AnswerClaim ──► observe: signs and levels of its replica ──► judge, once a second: findings of each replica

The bounds:

- Equal bytes are equal tokens: the count of a prompt is that of the same prompt at another replica.
- A token is at least a byte: a prompt has no more tokens than bytes, apart from its template.
- A prompt that was never sent to a replica is not cached there.
- A streamed token was computed: an answer has no fewer tokens than passed.
- Replicas of one pool are about equally fast, and equally rarely silent.

One answer proves nothing: its prompt may be odd, and the gateway's own view incomplete. A finding needs half of the replica's
recent answers, of two clients if it has several, so that no single client can discredit a replica. Most bounds are relative to
the pool: other gateways, a shared KV store, a template that prints nothing of a prompt or a slow network affect all replicas
alike, and are no finding. So most need a pool of two replicas at least; and in a pool of two, if it is unknown which of the two
counts is right, both have the finding.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from gateway.features.audit.claim import AnswerClaim
from gateway.features.audit.evidence import RatioLevel, SignTally
from gateway.features.audit.twins import PromptTwins
from router import TEMPLATE_TOKENS
from router.types import KEY_BYTES

# Findings, the values of the label `finding`.
PROMPT_EXCESS: Final = "prompt_excess"  # more prompt tokens than the request has bytes
PROMPT_CUT: Final = "prompt_cut"  # far fewer prompt tokens than a long prompt must have
PROMPT_DIFFERS: Final = "prompt_differs"  # another count than other replicas have for the same prompts
CACHED_UNSENT: Final = "cached_unsent"  # cached tokens of prompts that were never sent there
ANSWER_SHORT: Final = "answer_short"  # fewer answer tokens than were streamed
ANSWER_EXCESS: Final = "answer_excess"  # more answer tokens for each event than at other replicas
ANSWERS_EMPTY: Final = "answers_empty"  # answers without a token, unlike other replicas
USAGE_MISSING: Final = "usage_missing"  # no usage, unlike other replicas
PREFILL_FAST: Final = "prefill_fast"  # faster than any machine, and far from the others
PREFILL_SLOW: Final = "prefill_slow"  # far slower than the others
DECODE_FAST: Final = "decode_fast"
DECODE_SLOW: Final = "decode_slow"

SIGNS: Final = (PROMPT_EXCESS, PROMPT_CUT, PROMPT_DIFFERS, CACHED_UNSENT, ANSWER_SHORT, ANSWERS_EMPTY, USAGE_MISSING)
PREFILL, DECODE, PER_EVENT = "prefill", "decode", "per_event"
# Findings of a level, with the factor from the median of the others. Replicas of one pool may be of different hardware, and
# some engines put several tokens into an event: so a level is too high only above MOST (tokens per second, or per event).
MOST: Final = {PREFILL: 100_000.0, DECODE: 2000.0, PER_EVENT: 16.0}
ABOVE: Final = ((PREFILL, PREFILL_FAST, 8.0), (DECODE, DECODE_FAST, 8.0), (PER_EVENT, ANSWER_EXCESS, 16.0))
BELOW: Final = ((PREFILL, PREFILL_SLOW, 16.0), (DECODE, DECODE_SLOW, 16.0))
FINDINGS: Final = (*SIGNS, *(row[1] for row in ABOVE), *(row[1] for row in BELOW))
ABSOLUTE: Final = frozenset([PROMPT_EXCESS, PROMPT_CUT, ANSWER_SHORT])  # no other replica is needed for these
# The router learns nothing from a replica with one of these.
DISTRUSTED: Final = frozenset([PROMPT_EXCESS, PROMPT_CUT, PROMPT_DIFFERS, CACHED_UNSENT, ANSWERS_EMPTY, PREFILL_FAST])
# It answers at once, so that its queue is always the shortest: new work costs more there, as in a slow start.
TOO_FAST: Final = frozenset([ANSWERS_EMPTY, PREFILL_FAST])

LONG_UNITS: Final = 32_768  # a prompt shorter than this is not checked for a cut
CUT: Final = 16  # bytes per token of a text that is not cut
CAPPED: Final = 1.5  # a prompt so many times longer than that of the largest count, with the same count, is cut
UNSENT_TOKENS: Final = 512  # the answer before, which the client sends back, was never sent but is cached
PASSED: Final = 16  # tokens of a stream that is compared with its count
LEAST_TO_COMPARE: Final = 4.0  # answers of a replica that others are compared with
PREFILLED: Final = 1000  # computed prompt tokens of a measured prefill
DECODED: Final = 32


class AuditedReplica:
    """The evidence about one replica. pool: its name. clients: up to two of its clients. longest: the largest count of a
    prompt, and the shortest length with it. cut_units: length of the shortest prompt that was cut. answers: the largest number
    of tokens of an answer.
    """

    __slots__ = ("answers", "clients", "cut_units", "levels", "longest", "pool", "signs")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.clients: tuple[int, ...] = ()
        self.longest = (0, 0)
        self.cut_units = 0
        self.answers = UNSENT_TOKENS
        self.signs = {name: SignTally() for name in SIGNS}
        self.levels = {name: RatioLevel() for name in (PREFILL, DECODE, PER_EVENT)}


class Audit:
    """The audit of one process. Memory: O(replicas), and that of PromptTwins."""

    def __init__(self) -> None:
        self._replicas: dict[str, AuditedReplica] = {}
        self._twins = PromptTwins()

    def forget(self, replica: str) -> None:
        """The replica is another process, or has left."""
        self._replicas.pop(replica, None)
        self._twins.forget(replica)

    @property
    def replicas(self) -> Iterable[str]:
        return tuple(self._replicas)

    # -- evidence

    def observe(self, replica: str, pool: str, claim: AnswerClaim) -> None:
        """Add the claims of an answer. O(1)."""
        known = self._replicas.get(replica)
        if known is None or known.pool != pool:
            known = self._replicas[replica] = AuditedReplica(pool)
        client, usage, signs = claim.client, claim.usage, known.signs
        if len(known.clients) < 2 and client not in known.clients:
            known.clients += (client,)
        signs[USAGE_MISSING].add(usage is None, client)
        if usage is None:
            return
        known.answers = max(known.answers, usage.completion)
        signs[ANSWERS_EMPTY].add(not (usage.completion if claim.passed is None else claim.passed), client)
        if not claim.images and claim.units:
            self._prompt(replica, known, claim, usage.prompt)
        if claim.sent is not None and usage.cached is not None and usage.prompt > 2 * (claim.sent + known.answers):
            signs[CACHED_UNSENT].add(usage.cached > claim.sent + known.answers, client)
        if claim.passed and claim.passed >= PASSED:
            signs[ANSWER_SHORT].add(usage.completion * 2 < claim.passed, client)
            if usage.completion:
                known.levels[PER_EVENT].add(usage.completion / claim.passed)
        computed = usage.prompt - (usage.cached or 0)
        if claim.prefill_s and computed >= PREFILLED:
            known.levels[PREFILL].add(computed / claim.prefill_s)
        if claim.decode_s and usage.completion >= DECODED:
            known.levels[DECODE].add(usage.completion / claim.decode_s)

    def _prompt(self, replica: str, known: AuditedReplica, claim: AnswerClaim, tokens: int) -> None:
        """Check the count of a prompt."""
        signs, client, units = known.signs, claim.client, claim.units
        excess = tokens > claim.size + TEMPLATE_TOKENS
        signs[PROMPT_EXCESS].add(excess, client)
        if excess:
            return
        if units >= LONG_UNITS:
            few = tokens * (CUT if claim.scale else 2) < units
            capped = tokens >= 0.99 * known.longest[0] and units > CAPPED * known.longest[1] > 0
            if few or capped:
                known.cut_units = min(units, known.cut_units or units)
                signs[PROMPT_CUT].add(True, client)
            elif units >= known.cut_units:
                signs[PROMPT_CUT].add(False, client)
        if tokens > known.longest[0] * 1.01:
            known.longest = tokens, units
        if claim.keys and len(self._replicas) > 1:
            tail = units - len(claim.keys) // KEY_BYTES * claim.block_units
            others = self._twins.count((claim.scale, claim.keys[-KEY_BYTES:], units), replica, tokens)
            if others:  # the last part of a block may be another one, of the same length
                room = 4 + max(0, tail) / (4 if claim.scale else 1)
                signs[PROMPT_DIFFERS].add(all(abs(tokens - other) > room for other in others), client)

    # -- judgement

    def judge(self) -> dict[str, frozenset[str]]:
        """The present findings of each replica; replicas without any are omitted. O(replicas log replicas)."""
        found: dict[str, set[str]] = {}
        pools: dict[str, list[tuple[str, AuditedReplica]]] = {}
        for name, replica in self._replicas.items():
            pools.setdefault(replica.pool, []).append((name, replica))
        for members in pools.values():
            for sign in SIGNS:
                for name in _signed(sign, members):
                    found.setdefault(name, set()).add(sign)
            if len(members) < 2:
                continue
            for level, finding, factor in ABOVE:
                for name, mean, others in _levels(level, members):
                    if mean - others > math.log(factor) and mean > math.log(MOST[level]):
                        found.setdefault(name, set()).add(finding)
            for level, finding, factor in BELOW:
                for name, mean, others in _levels(level, members, least=2):
                    if others - mean > math.log(factor) and others <= math.log(MOST[level]):
                        found.setdefault(name, set()).add(finding)
        return {name: frozenset(findings) for name, findings in found.items()}

    def __repr__(self) -> str:
        return f"<Audit of {len(self._replicas)} replicas, {len(self._twins)} prompts>"


def _signed(sign: str, members: list[tuple[str, AuditedReplica]]) -> list[str]:
    """The replicas that show a sign, unlike most others."""
    shown = [(name, each.signs[sign]) for name, each in members if each.signs[sign].shows(alone=len(each.clients) < 2)]
    if not shown or sign in ABSOLUTE:
        return [name for name, _ in shown]
    counted = [(name, each.signs[sign]) for name, each in members if each.signs[sign].total >= LEAST_TO_COMPARE]
    if sign == PROMPT_DIFFERS and len(counted) == 2:  # which of two counts is right is unknown
        return [name for name, _ in shown]
    usual = dict(zip([name for name, _ in counted], medians([tally.share for _, tally in counted]), strict=True))
    return [name for name, tally in shown if (others := usual.get(name)) is not None and others <= tally.share / 2]


def _levels(level: str, members: list[tuple[str, AuditedReplica]], least: int = 1) -> list[tuple[str, float, float]]:
    """(replica, its level, the median of the others), as logarithms. least: number of the others."""
    known = [(name, each.levels[level].mean) for name, each in members if each.levels[level].known]
    if len(known) <= least:
        return []
    compared = zip(known, medians([mean for _, mean in known]), strict=True)
    return [(name, mean, others) for (name, mean), others in compared if others is not None]


def medians(values: list[float]) -> list[float | None]:
    """For each value the median of the others; None if there are none. O(n log n)."""
    order, others = sorted(values), len(values) - 1
    if others < 1:
        return [None] * len(values)
    low, high = (others - 1) // 2, others // 2
    found: list[float | None] = []
    for value in values:
        own = bisect_left(order, value)
        found.append((order[low + (low >= own)] + order[high + (high >= own)]) / 2)
    return found
