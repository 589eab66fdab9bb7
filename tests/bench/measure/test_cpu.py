"""CPU and memory of a process tree, against children that burn and take a known amount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.measure.cpu import cores, cpu_seconds, peak_bytes, pinned, rss_bytes, tree

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
REPORT = "print(time.process_time(), flush=True)\ninput()\n"


@contextmanager
def child(code: str) -> Iterator[tuple[int, str]]:
    """(its pid, its first line); it waits for its input's end."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline()
    finally:
        process.communicate()


def test_cpu_is_what_the_process_reports_of_itself() -> None:
    with child(BURN.format(seconds=0.3) + REPORT) as (pid, line):
        assert 0.3 <= float(line) <= cpu_seconds(pid) < float(line) + 0.05


@pytest.mark.parametrize("ended", [False, True], ids=["living", "ended"])
def test_cpu_of_children_counts(ended: bool) -> None:
    inner = BURN.format(seconds=0.2) + ("" if ended else REPORT)
    outer = (
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {inner!r}], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE)\nchild.wait() if "
        f"{ended} else child.stdout.readline()\nprint(child.pid, flush=True)\ninput()\nchild.communicate()\n"
    )
    with child(outer) as (pid, line):
        assert tree(pid) == ([pid] if ended else [pid, int(line)])
        assert 0.19 <= cpu_seconds(pid) < 3.0


def test_memory_is_of_the_tree_and_the_peak_stays() -> None:
    code = "taken = bytearray(b'x') * 50_000_000\nprint(1, flush=True)\ninput()\n"
    given_back = "taken = bytearray(b'x') * 50_000_000\ndel taken\nprint(1, flush=True)\ninput()\n"
    with child("print(1, flush=True)\ninput()\n") as (small, _), child(code) as (large, _), child(given_back) as (once, _):
        assert rss_bytes(large) - rss_bytes(small) > 45_000_000
        assert rss_bytes(once) - rss_bytes(small) < 20_000_000
        assert peak_bytes(once) - peak_bytes(small) > 45_000_000
        assert rss_bytes(os.getpid()) >= rss_bytes(small) + rss_bytes(large) + rss_bytes(once)


def test_what_has_ended_costs_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert tree(process.pid) == []
    assert cpu_seconds(process.pid) == rss_bytes(process.pid) == peak_bytes(process.pid) == 0


def test_children_inherit_cores_and_ours_come_back() -> None:
    before = os.sched_getaffinity(0)
    first, others = cores()
    assert len(first) == 1
    assert first | others == before
    with pinned(first), child("import os\nprint(*os.sched_getaffinity(0), flush=True)\ninput()\n") as (_, line):
        assert {int(core) for core in line.split()} == first
    assert os.sched_getaffinity(0) == before
