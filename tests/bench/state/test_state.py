"""The bench of the store finds what was put into it, in small."""

from __future__ import annotations

from pathlib import Path

from bench.state.__main__ import report
from bench.state.costs import DEPTHS, Clock, Cost, Findings, kill, opened, purge, puts
from bench.state.requests import measured


async def test_a_small_one(tmp_path: Path) -> None:
    findings, clock, url = Findings("SQLite", 100), Clock(), f"sqlite:///{tmp_path}/a.sqlite"
    async with opened(url, clock) as (_, store):
        await puts(store, findings, 5)
        assert len(await store.chain("tenant:bench", "c0-99", 1 << 30)) == 100
        await purge(store, clock, findings)
    await kill(url, findings, 10)
    assert findings.purged == 105
    assert findings.acknowledged >= 10
    assert findings.missing == 0
    assert findings.group.wall_s > 0 < findings.alone.wall_s
    findings.reads = dict.fromkeys(DEPTHS, Cost(1.0, 1.0))
    text = report([findings], {"kept": 5.0}, {"kept": 0}, "how")
    assert "| 105 in " in text
    assert "**0**" in text


async def test_requests_are_kept_or_not_as_they_ask(tmp_path: Path) -> None:
    costs, wrong = await measured(f"sqlite:///{tmp_path}/a.sqlite", 5, 1)
    assert len(costs) == 3
    assert set(wrong.values()) == {0}
