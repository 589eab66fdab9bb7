"""The bench of the store finds what was put into it, in small."""

from __future__ import annotations

from pathlib import Path

from bench.state.__main__ import report
from bench.state.costs import DEPTHS, Clock, Cost, Findings, opened, purge, puts
from bench.state.killed import kill, kill_gateways
from bench.state.requests import measured


async def test_a_small_one(tmp_path: Path) -> None:
    findings, clock, url = Findings("SQLite", 100), Clock(), f"sqlite:///{tmp_path}/a.sqlite"
    async with opened(url, clock) as (_, store):
        await puts(store, findings, 5)
        assert len(await store.chain("tenant:bench", "c0-99", 1 << 30)) == 100
    await kill(url, findings, 10)
    await kill_gateways(url, findings, 20)
    async with opened(url, clock) as (_, store):
        await purge(store, clock, findings)
    assert findings.purged >= 105 + findings.acknowledged
    assert findings.acknowledged >= 10
    assert findings.acknowledged_of_two >= 20
    assert (findings.missing, findings.missing_of_two) == (0, 0)
    assert findings.group.wall_s > 0 < findings.alone.wall_s
    findings.reads = dict.fromkeys(DEPTHS, Cost(1.0, 1.0))
    text = report([findings], {"kept": 5.0}, {"kept": 0}, "how")
    assert f"| {findings.purged:,} in " in text
    assert text.count("**0**") == 2


async def test_requests_are_kept_or_not_as_they_ask(tmp_path: Path) -> None:
    costs, wrong = await measured(f"sqlite:///{tmp_path}/a.sqlite", 5, 1)
    assert len(costs) == 3
    assert set(wrong.values()) == {0}
