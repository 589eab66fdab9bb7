"""The benchmark of many streams: a small run, and a report of lost ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gateway.streams import Result, main, report

OPTIONS = {"streams": 10, "seconds": 6.0, "interval": 0.1, "ramp": 1.0, "system": "warmroute"}
TALLY = {"sent": 10, "good": 10, "words": 600, "errors": {}, "gap_p50": 0.1, "gap_p99": 0.12}


def test_no_stream_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--streams",
        "20",
        "--seconds",
        "1.5",
        "--interval",
        "0.05",
        "--ramp",
        "0.2",
        "--system",
        "warmroute-plain",
        "--out",
        str(tmp_path),
    ]
    main(flags)
    text = (tmp_path / "streams.md").read_text("utf-8")
    assert capsys.readouterr().out == text
    assert "**Streams lost: 0 of 20.** Chunks received: 600." in text
    found = json.loads((tmp_path / "streams.json").read_text("utf-8"))
    assert found["lost"] == 0
    assert found["direct"]["good"] == found["direct"]["sent"] == 1
    assert found["chunk_us"] > 0
    assert min(size for _, size in found["memory"]) > 10_000_000


def test_a_report_states_what_was_lost_and_whether_memory_grew() -> None:
    memory = [(float(second), 50_000_000 + 1_000_000 * second) for second in range(8)]
    through = {**TALLY, "good": 8, "errors": {"cut off": 2}}
    text = "\n".join(report(Result(OPTIONS, through, TALLY, 50_000_000, memory, 0.01, 16.7), "Made here."))
    assert "**Streams lost: 2 of 10.** Chunks received: 600." in text
    assert "Errors through it: 2 x cut off." in text
    assert "| **warmroute** | 100.00 | 120.00 |" in text
    assert "52.0 MB in the first third of the time and 56.0 MB in the last (+7.7%): 600.0 kB a stream." in text
    assert "| 7 | 57.0 |" in text
