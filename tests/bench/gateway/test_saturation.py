"""The benchmark of saturation: a small run, its report, and the load that asks all at once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.gateway.saturation import Cell, cell, main, report
from bench.measure.load import Closed, closed_loop
from bench.measure.replies import WORDS
from tests.bench.measure.test_load import Liar, mock, serving

FLAGS = ["--sizes", "2000,9000", "--connections", "5", "--rounds", "1", "--seconds", "0.3", "--only", "warmroute-plain"]


def test_every_load_meets_every_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*FLAGS, "--out", str(tmp_path)])
    text = (tmp_path / "saturation.md").read_text("utf-8")
    assert capsys.readouterr().out == text
    assert "## 9 kB, 5 connections" in text
    cells = [Cell(**row) for row in json.loads((tmp_path / "saturation.json").read_text("utf-8"))["cells"]]
    assert [(one.system, one.size) for one in cells] == [
        (name, size) for size in (2000, 9000) for name in ("warmroute-plain", "direct")
    ]
    for one in cells:
        assert not one.errors
        assert 0 < one.p50_s <= one.p99_s <= one.max_s < 5
        assert one.rate > 0
        assert (one.cpu_us > 0) == (one.system != "direct")


def test_medians_of_the_rounds_and_all_their_errors() -> None:
    def one_round(n: int) -> dict[str, object]:
        times = {"first_p50": n, "first_p99": 2 * n, "first_max": 3 * n}
        return {**times, "in_time": 10 * n, "good": 10, "cpu_s": 0.001 * n, "errors": {"x": n}}

    rounds = [one_round(n) for n in (1, 2, 9)]
    found = cell("nginx", Closed(1, size=220_000, connections=200, seconds=4.0), rounds)
    assert found == Cell("nginx", 220_000, 200, 2, 4, 6, rate=5.0, cpu_us=pytest.approx(200.0), errors={"x": 12})
    text = "\n".join(report([found], ["smg is not there"], "Made so."))
    assert "| nginx | 2,000 | 4,000 | 6,000 | 1.00 | 5 | 200 |" in text
    assert "**nginx: 12 x x.**" in text
    assert "Left out: smg is not there" in text


async def test_all_ask_before_the_server_accepts_any() -> None:
    """The server's event loop is this one: it has had no turn when the last client has asked."""
    async with serving(mock) as port:
        found = await closed_loop(Closed(port, size=400_000, connections=30, requests=90, at_once=True))
    assert (found["sent"], found["good"], found["words"], found["errors"]) == (90, 90, 90 * WORDS, {})
    assert found["in_time"] == 90
    assert found["first_max"] < 5


async def test_a_connection_that_is_cut_off_is_an_error_and_replaced() -> None:
    async with serving(lambda: Liar([b""])) as port, asyncio.timeout(20):
        found = await closed_loop(Closed(port, connections=2, requests=4, seconds=5.0, at_once=True))
    assert found["sent"] == 4
    assert found["errors"].keys() <= {"cut off", "cut off: ConnectionResetError"}
