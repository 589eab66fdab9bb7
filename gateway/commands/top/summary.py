"""A gateway in two lines: what it is, and what it does. Pure."""

from __future__ import annotations

from typing import Final

from gateway.commands.top.state import Live
from gateway.commands.top.values import age, count, duration, money, percent, rate

NOW_S: Final = 10.0  # of which a rate is the mean


def head(live: Live) -> str:
    workers = f"{live.workers} workers" if live.workers != 1 else "1 worker"
    return f"{live.version}  policy {live.policy}  {workers}"


def figures(live: Live) -> list[str]:
    """The most important one first."""
    now, whole, last = live.totals(NOW_S), live.totals(live.step_s * max(1, len(live.points))), live.last
    up = sum([replica.state == "up" for replica in live.replicas])
    all_ = len(live.replicas) + round(live.further_replicas)
    found = [
        f"{rate(now.requests / now.seconds if now.seconds else 0.0)} req/s",
        f"{percent(whole.hits)} cached",
        f"{up}/{all_} replicas",
        f"{count(last.running if last else 0)} running, {count(last.waiting if last else 0)} waiting",
        f"TTFT p50 {duration(last.ttft_p50_s if last else None)}, p90 {duration(last.ttft_p90_s if last else None)}",
        f"{money(whole.cost)} spent, {money(whole.saved)} saved",
        f"{count(whole.errors)} errors, {count(whole.refused)} refused",
    ]
    return [*found, f"in {age(whole.seconds)}"] if live.points else found
