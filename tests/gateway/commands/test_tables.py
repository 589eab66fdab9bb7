"""Tables, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from gateway.commands.demo.table import DemoTurn, print_comparison, print_header, print_turn
from gateway.commands.tables import number, print_table, text
from gateway.dialects.usage import Usage
from tests.support.paths import ROOT


def turn(name: str, cached: int | None) -> DemoTurn:
    return DemoTurn(name, 1, "127.0.0.1:40000", "warm", Usage(1000, 20, cached), 900, 0.25, 0.0001, 0.0002, (), "")


def test_a_table_has_a_line_for_each_row_however_long_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([text("name"), number("n")], [("a" * 300, "1"), ("[b] :smile:", "-2.5")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "n"], ["a" * 300, "1"], ["[b]", ":smile:", "-2.5"]]
    assert len({len(line) for line in lines}) == 1


def test_rows_that_are_printed_one_by_one_are_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_header()
    print_turn(turn("lamp", 100))
    print_turn(turn("fog", None))
    upper, head, *rows = capsys.readouterr().out.splitlines()
    assert upper.split() == ["cached", "tokens:"]
    assert head.split() == ["turn", "replica", "why", "prompt", "predicted", "reported", "TTFT", "s", "cost", "$", "saved", "$"]
    assert [row.split()[6] for row in rows] == ["100", "?"]
    assert len({len(line) for line in (upper, head, *rows)}) == 1


def test_the_runs_of_the_demo_are_compared_by_their_totals(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison({"warmroute (cost)": [turn("a", 500), turn("b", 700)], "round robin": [turn("a", None)]})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["warmroute", "(cost)", "2000", "1200", "60.0%", "0.250", "0.0002000", "0.0004000"]
    assert rows[2] == ["round", "robin", "1000", "0", "0.0%", "0.250", "0.0001000", "0.0002000"]


def test_a_terminal_gets_a_bold_header_and_a_pipe_gets_no_control_codes() -> None:
    command = [sys.executable, "-c", "from gateway.commands.tables import *; print_table([text('name')], [['a']])"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    subprocess.run(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, check=True)
    assert os.read(ours, 1 << 16) == b"\x1b[1mname\x1b[0m\r\na   \r\n"
    os.close(ours)
    os.close(theirs)
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout == b"name\na   \n"
