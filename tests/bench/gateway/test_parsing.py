"""What bodies cost, on the smallest of them."""

from __future__ import annotations

import pytest

from bench.gateway.parsing import SIZES, main


def test_help_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--shapes" in out
    assert "longest gap" not in out


def test_it_measures_the_shapes_and_sizes_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shapes", "text", "lists", "--most", str(SIZES[0])]) == 0
    _, text, lists = capsys.readouterr().out.splitlines()
    assert text.startswith("text")
    assert lists.startswith("lists")
