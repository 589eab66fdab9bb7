"""The table of live turns, and the gateway that leaves the billing line in."""

from __future__ import annotations

from pathlib import Path

from bench.agents.live import Turn, billed, report
from bench.gateway.systems import Setting
from gateway.config.source import load


def test_later_turns_are_summed_without_the_first() -> None:
    turns = [Turn("messages", 9.0, 100, 0), Turn("messages", 1.0, 200, 150), Turn("messages", 3.0, 300, 290)]
    row = "| plain | 9.00 | 2.00 | 3.00 | 500 | 440 (88.0%) | 75.0% |"
    assert row in report("Made by hand.", {"plain": turns}).splitlines()


def test_the_line_is_left_in_by_a_configuration_that_the_gateway_takes(tmp_path: Path) -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    command = billed(kept=True).command(Setting(8123, 8124, urls, tmp_path, "python"))
    assert "--replica" not in command
    assert command[command.index("--port") + 1] == "8123"
    config = load(Path(command[command.index("--config") + 1]), {}, env={})
    assert [pool.strip_billing_header for pool in config.pools] == [False]
    assert [replica.url for replica in config.pools[0].replicas] == list(urls)
