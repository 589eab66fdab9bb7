"""Prints sums of usage as a table, CSV or JSON.

Names of tenants, models and the like may come from clients. Control characters are escaped, because a terminal obeys some of
them. A CSV cell that a spreadsheet would take for a formula gets a leading apostrophe.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

from gateway.accounting.money import decimal
from gateway.commands.streams import escaped
from gateway.features.ledger.sums import MONEY, Period, UsageReport, UsageSums, total

TOTAL: Final = "total"
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # as ASCII, and in full width
_MICRO: Final = 10**6  # picodollars
_COUNTS: Final = {
    "requests": "requests",
    "failed": "failed",
    "estimated": "estimated",
    "unpriced": "unpriced",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "cache_write_tokens": "written",
    "cache_write_1h_tokens": "hours",
    "completion_tokens": "completion",
    "images": "images",
}


def print_usage(found: UsageReport, by: Sequence[str]) -> None:
    """Print one row per group and one for the total."""
    from gateway.commands.tables import number, print_table, text

    names = (
        "requests",
        "failed",
        "prompt",
        "cached",
        "written",
        "completion",
        "hit ratio",
        "cost USD",
        "saved USD",
        "estimated",
    )
    rows = [[*map(escaped, group.names), *_cells(group)] for group in found.groups]
    rows.append([*(TOTAL if at == 0 else "" for at in range(len(by))), *_cells(total(found.groups))])
    print_table([*map(text, by), *map(number, names)], rows)


def _cells(sums: UsageSums) -> list[str]:
    tokens = [f"{sums[name]:,}" for name in ("requests", "failed", "prompt", "cached", "written", "completion")]
    shares = [f"{share:.1%}" for share in (hit_ratio(sums), estimated_share(sums))]
    return [*tokens, shares[0], micro_dollars(sums.cost), micro_dollars(sums["saved"]), shares[1]]


def write_csv(found: UsageReport, by: Sequence[str], out: TextIO) -> None:
    """Write one row per group; amounts have all digits."""
    lines = csv.writer(out, lineterminator="\n")
    money = [f"{name}_usd" for name in ("cost", *MONEY)]
    lines.writerow([*by, *_COUNTS, *money, "hit_ratio", "estimated_share"])
    for group in found.groups:
        counts = [group[name] for name in _COUNTS.values()]
        amounts = [decimal(amount) for amount in (group.cost, *(group[name] for name in MONEY))]
        ratios = [f"{ratio:.6f}" for ratio in (hit_ratio(group), estimated_share(group))]
        lines.writerow([*map(safe_cell, group.names), *counts, *amounts, *ratios])


def as_json(found: UsageReport, by: Sequence[str], period: Period) -> str:
    """The report as JSON. Amounts are strings in USD, because these are exact."""
    answer = {
        "since": _iso(period.since_ms),
        "until": None if period.until_ms is None else _iso(period.until_ms),
        "by": list(by),
        "groups": [dict(zip(by, group.names, strict=True)) | dict(_values(group)) for group in found.groups],
        "total": dict(_values(total(found.groups))),
        "incomplete_days": [{"day": day, "rows": rows, "requests": requests} for day, rows, requests in found.incomplete],
    }
    return json.dumps(answer, indent=2)


def _values(sums: UsageSums) -> Iterator[tuple[str, Any]]:
    yield from ((name, sums[column]) for name, column in _COUNTS.items())
    yield "cost_usd", decimal(sums.cost)
    yield from ((f"{name}_usd", decimal(sums[name])) for name in MONEY)
    yield "hit_ratio", round(hit_ratio(sums), 6)
    yield "estimated_share", round(estimated_share(sums), 6)


def hit_ratio(sums: UsageSums) -> float:
    """The cached share of the prompt tokens."""
    return sums["cached"] / sums["prompt"] if sums["prompt"] else 0.0


def estimated_share(sums: UsageSums) -> float:
    """The share of requests with estimated counts."""
    return sums["estimated"] / sums["requests"] if sums["requests"] else 0.0


def micro_dollars(amount: int) -> str:
    """Picodollars in USD, rounded to 10^-6."""
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    whole, rest = divmod((amount + _MICRO // 2) // _MICRO, 10**6)
    return f"{sign if whole or rest else ''}{whole:,}.{rest:06d}"


def safe_cell(text: str) -> str:
    """The text as a spreadsheet cell."""
    text = escaped(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _iso(at_ms: int) -> str:
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).isoformat(timespec="milliseconds")
