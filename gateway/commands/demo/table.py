"""The demo's two tables: one row per turn, and the totals of both policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.commands.tables import number, print_table, text
from gateway.dialects.usage import Usage

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One answered request. ttft_s: at the client. cost_usd, saved_usd: as the gateway metered it."""

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


_MONEY: Final = (("\nTTFT s", 7), ("\ncost $", 11), ("\nsaved $", 11))
_TURN: Final = (("\nprompt", 6), ("cached tokens:\npredicted", 14), ("\nreported", 8))


def print_header() -> None:
    """Print the header of the turns' table."""
    _print_turns([], header=True)


def print_turn(turn: DemoTurn) -> None:
    """Print a turn's row."""
    reported = "?" if turn.usage.cached is None else str(turn.usage.cached)
    tokens = (str(turn.usage.prompt), str(turn.predicted), reported)
    name = f"{turn.conversation} {turn.number}"
    money = _money(turn.ttft_s, turn.cost_usd, turn.saved_usd)
    _print_turns([(name, turn.replica, turn.reason, *tokens, *money)], header=False)


def _print_turns(rows: Sequence[Sequence[str]], *, header: bool) -> None:
    texts = (text("\nturn", 8), text("\nreplica", 15), text("\nwhy", 6))
    print_table((*texts, *(number(*column) for column in (*_TURN, *_MONEY))), rows, header=header)


def print_comparison(runs: Mapping[str, Sequence[DemoTurn]]) -> None:
    """Prints the totals of each run of the same prompts; the TTFT is the mean."""
    rows = []
    for name, turns in runs.items():
        prompt, cached = sum(turn.usage.prompt for turn in turns), sum(turn.usage.cached or 0 for turn in turns)
        ttft = sum(turn.ttft_s for turn in turns) / len(turns)
        money = _money(ttft, sum(turn.cost_usd for turn in turns), sum(turn.saved_usd for turn in turns))
        rows.append((name, str(prompt), str(cached), f"{cached / prompt:.1%}", *money))
    tokens = (number("prompt"), number("cached"), number("hits"))
    print_table((text("the same prompts"), *tokens, *(number(name.strip()) for name, _ in _MONEY)), rows)


def _money(ttft_s: float, cost_usd: float, saved_usd: float) -> tuple[str, str, str]:
    return f"{ttft_s:.3f}", f"{cost_usd:.7f}", f"{saved_usd:.7f}"
