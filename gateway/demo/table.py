"""The demo's two tables: a row per turn as it comes, and the totals of both policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.metering import Usage

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request. ttft_s: at the client. cost_usd and saved_usd: as the gateway metered it."""

    conversation: str
    number: int
    replica: str
    reason: str
    usage: Usage
    predicted: int
    ttft_s: float
    cost_usd: float
    saved_usd: float
    messages: Sequence[Message]
    answer: str


def header() -> str:
    tokens = f"{'prompt':>7} {'predicted':>10} {'reported':>9}"
    return f"{'':<25} {'':<6} {'':>7} {'cached tokens':>20}\n{'turn':<8} {'replica':<16} {'why':<6} {tokens} {_MONEY_HEADER}"


def row(turn: Turn) -> str:
    reported = "?" if turn.usage.cached is None else str(turn.usage.cached)
    name = f"{turn.conversation} {turn.number}"
    tokens = f"{turn.usage.prompt:>7} {turn.predicted:>10} {reported:>9}"
    return f"{name:<8} {turn.replica:<16} {turn.reason:<6} {tokens} {_money(turn.ttft_s, turn.cost_usd, turn.saved_usd)}"


def comparison(runs: Mapping[str, Sequence[Turn]]) -> str:
    """The totals of each run of the same prompts; the TTFT is the mean."""
    lines = [f"\n{'the same prompts':<18} {'prompt':>7} {'cached':>7} {'hits':>6} {_MONEY_HEADER}"]
    for name, turns in runs.items():
        prompt, cached = sum(turn.usage.prompt for turn in turns), sum(turn.usage.cached or 0 for turn in turns)
        ttft = sum(turn.ttft_s for turn in turns) / len(turns)
        money = _money(ttft, sum(turn.cost_usd for turn in turns), sum(turn.saved_usd for turn in turns))
        lines.append(f"{name:<18} {prompt:>7} {cached:>7} {cached / prompt:>6.1%} {money}")
    return "\n".join(lines)


_MONEY_HEADER = f"{'TTFT s':>8} {'cost $':>11} {'saved $':>11}"


def _money(ttft_s: float, cost_usd: float, saved_usd: float) -> str:
    return f"{ttft_s:>8.3f} {cost_usd:>11.7f} {saved_usd:>11.7f}"
