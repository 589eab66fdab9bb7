"""What a gateway does now, as text: for a pipe, a log, a mail."""

from __future__ import annotations

from typing import Final

from gateway.commands.tables import number, print_table
from gateway.commands.tables import text as column
from gateway.commands.top.state import Live, Sum
from gateway.commands.top.summary import figures, head
from gateway.commands.top.values import clock, count, duration, money, percent, share, short, text

SHOWN_REQUESTS: Final = 20


def print_live(admin: str, live: Live) -> None:
    """Names are shown without what a terminal obeys."""
    print(f"{text(admin)}  {head(live)}")
    print("  ".join(figures(live)))
    _print_replicas(live)
    if live.requests:
        _print_requests(live)
        for name, sums in (("model", live.models), ("tenant", live.tenants)):
            _print_sums(name, sums)
    else:
        print("\nNo request yet since this gateway is watched, which begins when it is asked.")


def _print_replicas(live: Live) -> None:
    print()
    names = ("running", "waiting", "prefill", "held", "capacity", "cached")
    rows = [
        [
            row.name,
            row.pool,
            f"{row.state} ({row.error})" if row.error and not row.up else row.state,
            count(row.inflight),
            short(row.waiting),
            short(row.booked_tokens),
            short(row.held_tokens),
            short(row.capacity_tokens),
            percent(row.cached),
        ]
        for row in live.replicas
    ]
    print_table([column("replica"), column("pool"), column("state"), *map(number, names)], rows)
    if live.further_replicas:
        print(f"{count(live.further_replicas)} further replicas")


def _print_requests(live: Live) -> None:
    print()
    recent = sorted(live.requests.values(), key=lambda row: -(row.time or 0.0))[:SHOWN_REQUESTS]
    rows = [
        [
            clock(row.time),
            row.outcome,
            row.model,
            row.tenant,
            row.replica,
            row.why,
            short(row.prompt),
            percent(share(row.cached or 0.0, row.prompt or 0.0)),
            duration(row.ttft_s),
            duration(row.seconds),
            money(row.cost_usd),
        ]
        for row in recent
    ]
    texts = [column(name) for name in ("time", "status", "model", "tenant", "replica", "why")]
    print_table([*texts, *map(number, ("prompt", "cached", "TTFT", "whole", "cost"))], rows)


def _print_sums(name: str, sums: dict[str, Sum]) -> None:
    print()
    rows = [
        [each, count(of.requests), count(of.failed), percent(share(of.cached, of.prompt)), money(of.cost), money(of.saved)]
        for each, of in sorted(sums.items(), key=lambda item: (-item[1].cost, -item[1].requests))[:SHOWN_REQUESTS]
    ]
    print_table([column(name), *map(number, ("requests", "failed", "cached", "cost", "saved"))], rows)
