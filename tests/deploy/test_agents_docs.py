"""The page about agents, held to the code."""

from __future__ import annotations

from gateway.request.pulses import EVENT_COUNTERS
from tests.support.paths import ROOT


def test_the_table_of_agents_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "agents.md").read_text("utf-8")
    table = text.partition("### Slow first tokens")[2].partition("### Notes")[0]
    late = [
        line for line in table.splitlines() if line.startswith("| ") and "| nothing before the replica's first byte" in line
    ]
    assert [line.split(" | ")[0].removeprefix("| ") for line in late] == list(EVENT_COUNTERS)
    for name in EVENT_COUNTERS["Codex"]:
        assert f"`{name.lower()}`" in table.lower()
