"""Hanging tests end; the gate's cases of a matrix exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WAITS = """
import asyncio, threading

async def test_its_thread_never_ends():
    waiting = asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    {ends}
"""
LOOPS = """
import itertools

def test_nothing_is_done_about_signals():
    any(itertools.repeat(0))
"""


@pytest.mark.parametrize(
    ("test", "where"),
    [
        (WAITS.format(ends="assert False"), "in _do_shutdown"),
        (WAITS.format(ends="await waiting"), "in _do_shutdown"),
        (LOOPS, "in test_nothing_is_done_about_signals"),
    ],
    ids=["failed", "timed out", "loops"],
)
def test_the_process_ends_with_all_stacks(test: str, where: str, tmp_path: Path) -> None:
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(test)
    limits = ["--timeout", "1", "-o", "faulthandler_timeout=4"]
    done = pytested(*limits, hangs)
    assert done.returncode == 1
    assert "Timeout (0:00:04)!" in done.stderr
    assert where in done.stderr


MATRIX = """
import pytest
from tests.support.tiers import gate

@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("letter", ["a", "b"])
@gate({cases}, reason="each letter, each number")
def test_a_pair(letter, number):
    pass
"""


def test_the_gate_has_the_cases_that_a_test_names(tmp_path: Path) -> None:
    file = tmp_path / "test_matrix.py"
    file.write_text(MATRIX.format(cases="'a-1', 'b-2'"))
    assert re.findall(r"::test_a_pair\[(.*)\]", pytested("--collect-only", "-q", "-m", "not nightly", file).stdout) == [
        "a-1",
        "b-2",
    ]
    file.write_text(MATRIX.format(cases="'a-1', 'c-*'"))
    assert "test_a_pair has no case c-*" in pytested("--collect-only", file).stderr


def pytested(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs pytest with this conftest on other files."""
    plain = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *plain, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
