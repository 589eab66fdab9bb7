"""The benchmark of TLS handshakes: a small run, with a real gateway and openssl's client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gateway.handshakes import main


@pytest.mark.nightly
def test_handshakes_are_counted_and_the_loop_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--plain", "--seconds", "2", "--clients", "2", "--burst", "20", "--keys", "EC P-256", "--out", str(tmp_path)])
    assert capsys.readouterr().out == (tmp_path / "handshakes.md").read_text("utf-8")
    idle, full, burst = json.loads((tmp_path / "handshakes.json").read_text("utf-8"))
    assert (idle["handshakes"], burst["handshakes"]) == (0, 20)
    assert full["handshakes"] > 0
    assert full["cpu_s"] > 0
    assert all(row["longest_ms"] >= row["p99_ms"] > 0 for row in (idle, full, burst))
