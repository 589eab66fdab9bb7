"""The report of bench.gateway: a table, the claims, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.gateway.systems import BEFORE

OURS, REFERENCE = "warmroute", "sglang-router"
MORE = 1.03  # of what a version before cost is ours to cost at most
SATURATED = 0.9  # of a core: below it, the load or a neighbour was what limited the requests/s
COLOURS = ("#0072B2", "#999999")  # ours, others


@dataclass(frozen=True, slots=True)
class Score:
    """One system. CPU in us; busy: share of its core in the part of the rate; errors: of the whole run, by reason.

    rounds: each one's CPU, in the order of COSTS.
    """

    name: str
    version: str
    short_us: float
    long_us: float
    chunk_us: float
    rate: float
    busy: float
    added_p50_ms: float
    added_p99_ms: float
    stream_rate: float
    rss_mb: float
    peak_mb: float
    errors: dict[str, int] = field(default_factory=dict)
    rounds: Sequence[tuple[float, ...]] = ()


COSTS = (
    ("short_us", "us per request, 2 kB", 1.0),
    ("long_us", "us per request, 32 kB", 0.75),
    ("chunk_us", "us per chunk", 0.8),
)
"""(field, its name, at most this multiple of the reference's is ours to be)"""


def report(scores: Sequence[Score], missing: Sequence[str], made_by: str, drawn: bool) -> Iterator[str]:
    yield "# Gateway: what the data plane costs\n"
    yield f"{made_by}\n"
    yield from table(scores)
    yield ""
    if any(score.busy < SATURATED for score in scores):
        yield "*at least*: its core was not busy all the time; the load generator or another program was the limit.\n"
    for score in scores:
        if score.errors:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in score.errors.items())
            yield f"**{score.name} made errors, so its figures do not count: {reasons}.**\n"
    for line in missing:
        yield f"Left out: {line}\n"
    if drawn:
        yield "![CPU of each system](gateway.png)\n"
    yield from ratios(scores)
    yield from against_before(scores)


def table(scores: Sequence[Score]) -> Iterator[str]:
    yield (
        "| | version | CPU us/request, 2 kB | 32 kB | CPU us/chunk | requests/s on a core"
        " | added TTFT p50 ms | p99 ms | at streams/s | RSS MB | peak MB | errors |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for score in sorted(scores, key=lambda score: score.short_us):
        name = f"**{score.name}**" if score.name == OURS else score.name
        rate = f"{score.rate:,.0f}" if score.busy >= SATURATED else f"at least {score.rate:,.0f}"
        yield (
            f"| {name} | {score.version} | {score.short_us:,.1f} | {score.long_us:,.1f} | {score.chunk_us:,.1f} | {rate}"
            f" | {score.added_p50_ms:.2f} | {score.added_p99_ms:.2f} | {score.stream_rate:,.0f}"
            f" | {score.rss_mb:,.0f} | {score.peak_mb:,.0f} | {sum(score.errors.values())} |"
        )


def ratios(scores: Sequence[Score]) -> Iterator[str]:
    """All costs as multiples of the reference's; then the promises about ours."""
    reference = next((score for score in scores if score.name == REFERENCE), None)
    if reference is None:
        yield f"No ratios: {REFERENCE} was not measured."
        return
    yield f"## Multiples of {REFERENCE}'s CPU\n"
    yield f"| | {' | '.join(name for _, name, _ in COSTS)} |"
    yield f"|---|{'--:|' * len(COSTS)}"
    for score in sorted(scores, key=lambda score: score.short_us):
        cells = [f"{getattr(score, key) / getattr(reference, key):.2f}" for key, _, _ in COSTS]
        yield f"| {f'**{score.name}**' if score.name == OURS else score.name} | {' | '.join(cells)} |"
    ours = next((score for score in scores if score.name == OURS), None)
    if ours is None:
        return
    if pairs := list(zip(ours.rounds, reference.rounds, strict=True)):
        medians = [median(mine[place] / theirs[place] for mine, theirs in pairs) for place in range(len(COSTS))]
        yield f"| *{OURS}, the median of the rounds' ratios* | {' | '.join(f'{ratio:.2f}' for ratio in medians)} |"
    bounds = [(getattr(ours, key) / getattr(reference, key), bound) for key, _, bound in COSTS]
    yield f"| *promised of ours, at most* | {' | '.join(f'{bound:.2f}' for _, bound in bounds)} |"
    yield f"| *kept?* | {' | '.join('yes' if ratio <= bound else '**no**' for ratio, bound in bounds)} |"


def against_before(scores: Sequence[Score]) -> Iterator[str]:
    """Our costs as multiples of those of the version that was measured beside it, if one was."""
    ours, before = (next((score for score in scores if score.name == name), None) for name in (OURS, BEFORE))
    if ours is None or before is None:
        return
    yield f"\n## Multiples of what {BEFORE} cost\n"
    yield f"| | {' | '.join(name for _, name, _ in COSTS)} |"
    yield f"|---|{'--:|' * len(COSTS)}"
    least = [getattr(ours, key) / getattr(before, key) for key, _, _ in COSTS]
    pairs = list(zip(ours.rounds, before.rounds, strict=True))
    middle = [median(now[place] / then[place] for now, then in pairs) for place in range(len(COSTS))]
    yield f"| the least of the rounds | {' | '.join(f'{ratio:.2f}' for ratio in least)} |"
    yield f"| the median of the rounds' ratios | {' | '.join(f'{ratio:.2f}' for ratio in middle)} |"
    yield f"| *promised, at most* | {' | '.join(f'{MORE:.2f}' for _ in COSTS)} |"
    yield f"| *kept by the least?* | {' | '.join('yes' if ratio <= MORE else '**no**' for ratio in least)} |"


def draw(path: Path, scores: Sequence[Score]) -> bool:
    """False if there is nothing to draw, or no matplotlib to draw with."""
    if not scores:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    picture = Figure(figsize=(12, 1.6 + 0.32 * len(scores)), dpi=110, layout="constrained")
    picture.suptitle("CPU of the data plane (user and system, whole process tree), logarithmic", fontsize=12)
    for axes, (key, name, _) in zip(picture.subplots(1, len(COSTS)), COSTS, strict=True):
        bars(axes, sorted(((getattr(score, key), score.name) for score in scores), reverse=True), name)
    picture.savefig(path, format="png")
    return True


def bars(axes: Any, costs: Sequence[tuple[float, str]], title: str) -> None:
    """The cheapest on top."""
    names = [name for _, name in costs]
    drawn = axes.barh(names, [cost for cost, _ in costs], color=[COLOURS[name != OURS] for name in names], height=0.7)
    axes.bar_label(drawn, [f"{cost:,.0f}" if cost >= 100 else f"{cost:.1f}" for cost, _ in costs], padding=3, fontsize=9)
    low, high = min(cost for cost, _ in costs), max(cost for cost, _ in costs)
    axes.set(title=title, xscale="log", xlim=(low / 2, high * 4))
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
