"""The count of instructions: what is made of the counts, and one real run."""

from __future__ import annotations

import shutil

import pytest

from bench.gateway.instructions import main, report, with_chunks
from tests.support.paths import ROOT


def test_a_chunk_is_the_difference_of_two_streams() -> None:
    rows = [("plain-2k", [200.0, 206.0]), ("stream-1", [300.0, 300.0]), ("stream-101", [1300.0, 1310.0])]
    assert list(with_chunks(rows)) == [
        ("a request, plain-2k", [200.0, 206.0]),
        ("a request, streamed, one chunk", [300.0, 300.0]),
        ("a further chunk", [10.0, 10.1]),
    ]


def test_versions_are_compared_with_the_first() -> None:
    text = "\n".join(report(["old", "new"], [("a request", [200_000.0, 206_000.0])]))
    assert "| thousands of instructions | old | new | to the first |" in text
    assert "| a request | 200.0 | 206.0 | +3.0% |" in text


@pytest.mark.tools
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_a_real_count(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tree", str(ROOT), "--only", "plain-2k", "--requests", "4", "--windows", "1"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| a request, plain-2k | ")
    assert 100 < float(row.split("|")[2].replace(",", "")) < 20_000
