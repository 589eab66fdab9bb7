"""Tests that hang end, whatever they wait for."""

from __future__ import annotations

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
    limits = ["--timeout", "1", "-o", "faulthandler_timeout=6"]
    plain = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *plain, *limits, hangs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:06)!" in done.stderr
    assert where in done.stderr
