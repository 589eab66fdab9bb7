"""The count of instructions: what is made of the counts, and one real run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.gateway.instructions import main, report, with_chunks
from tests.support.paths import ROOT
from tests.support.tiers import nightly


def test_a_chunk_is_the_difference_of_two_streams() -> None:
    rows = [("plain-2k", [200.0, 206.0]), ("stream-1", [300.0, 300.0]), ("stream-101", [1300.0, 1310.0])]
    assert list(with_chunks(rows)) == [
        ("a request, plain-2k", [200.0, 206.0]),
        ("a request, streamed, one chunk", [300.0, 300.0]),
        ("a further chunk", [10.0, 10.1]),
    ]


def test_each_dialect_has_chunks_of_its_own() -> None:
    rows = [("stream-1", [300.0]), ("messages-as-chat-stream-1", [500.0]), ("messages-as-chat-stream-101", [2500.0])]
    assert list(with_chunks(rows)) == [
        ("a request, messages-as-chat, streamed, one chunk", [500.0]),
        ("a further chunk, messages-as-chat", [20.0]),
    ]


def test_versions_are_compared_with_the_first() -> None:
    text = "\n".join(report(["old", "new"], [("a request", [200_000.0, 206_000.0])]))
    assert "| thousands of instructions | old | new | to the first |" in text
    assert "| a request | 200.0 | 206.0 | +3.0% |" in text


def test_a_tree_without_a_gateway_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tree", str(tmp_path)])
    assert f"{tmp_path} has no gateway" in capsys.readouterr().err


@pytest.mark.tools
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("work", ["plain-2k", "responses-as-chat-2k"])
@nightly("the parts of this program: the tests above")
def test_a_real_count(capsys: pytest.CaptureFixture[str], work: str) -> None:
    main(["--tree", str(ROOT), "--only", work, "--requests", "4", "--windows", "1"])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| a request, {work} | ")
    assert 100 < float(row.split("|")[2].replace(",", "")) < 20_000
