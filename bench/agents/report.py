"""Tables of a run with several systems and kinds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench.agents.run import Plan, Score


def report(made_by: str, plan: Plan, scores: Sequence[Score]) -> Iterator[str]:
    yield "# Coding agents: who keeps their conversations together\n"
    yield f"{made_by}\n"
    yield (
        f"{plan.conversations} conversations of {plan.turns} turns, {plan.concurrent} at a time, {plan.think_s:g} s of thinking"
        f" before each; {plan.shape.tools // 1000} kB of tools and {plan.shape.system // 1000} kB of system prompt that all"
        f" share, {plan.shape.turn / 1000:g} kB more each turn. {plan.replicas} stand-ins ({plan.engine}):"
        f" {plan.model.kv_tokens:,} KV tokens,"
        f" prefill {plan.model.prefill_rate:,.0f} tokens/s one after the other, decoding {plan.model.decode_rate:g} tokens/s."
        f"{' They keep responses.' if plan.keep else ''}\n"
    )
    kinds = list(dict.fromkeys(score.kind for score in scores))
    systems = list(dict.fromkeys(score.system for score in scores))
    found = {(score.system, score.kind): score for score in scores}
    yield "Turns that stay where the conversation is / prompt tokens cached:\n"
    yield f"| | {' | '.join(systems)} |"
    yield "|---" * (1 + len(systems)) + "|"
    for kind in kinds:
        yield f"| {kind} | {' | '.join(_brief(found.get((system, kind))) for system in systems)} |"
    for kind in kinds:
        yield f"\n## {kind}\n"
        yield "| | turns that stay | cached | TTFT mean, ms | p50 | p99 | errors | metered: hit, miss | unmetered |"
        yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
        rows = [found[system, kind] for system in systems if (system, kind) in found]
        yield from (_row(score) for score in rows)
        yield from reasons(rows)


def _brief(score: Score | None) -> str:
    if score is None:
        return ""
    return "-" if score.refused else f"{score.stay_share:.0%} / {score.cached_share:.1%}"


def _row(score: Score) -> str:
    meter = score.metered
    own = [f"{meter.hit:,}, {meter.miss:,}", str(meter.unmetered)] if meter else ["", ""]
    errors = f"{score.errors.total()} of {score.sent}" if score.errors else "0"
    if score.refused:
        return f"| {score.system} | {' | '.join([*'-----', errors, *own])} |"
    times = [statistics.fmean(score.ttft), statistics.median(score.ttft), quantile(score.ttft, 0.99)]
    cells = [f"{score.stay_share:.1%}", f"{score.cached_share:.1%}", *(f"{time * 1000:.0f}" for time in times), errors, *own]
    return f"| {score.system} | {' | '.join(cells)} |"


def reasons(rows: Sequence[Score]) -> Iterator[str]:
    """Of errors, below a table."""
    if any(score.errors or score.refused for score in rows):
        yield ""
    for score in rows:
        for reason, count in score.errors.most_common(3):
            yield f"- {score.system}: {count} × {reason}"
        if score.refused and not score.errors:
            yield f"- {score.system}: {score.refused}"


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def kept(score: Score) -> dict[str, Any]:
    """For the JSON report."""
    return {**asdict(score), "errors": dict(score.errors), "refused": score.refused}
