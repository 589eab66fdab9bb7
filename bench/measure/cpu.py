"""CPU time, memory and cores of a process with all its descendants. Linux only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
_CHILDREN_TIMES = slice(13, 15)  # cutime, cstime: of children that ended, in ticks


def tree(pid: int) -> list[int]:
    """The process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid] if _stat(pid) else []
    for parent in found:  # grows as it is walked
        found += children.get(parent, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the tree since it began, also of those that ended in it.

    Of the living it is read from the clock that clock_getcpuclockid(3) names: /proc/PID/stat has the same in steps of 10 ms.
    """
    total = 0.0
    for each in tree(pid):
        if fields := _stat(each):
            total += sum(map(int, fields[_CHILDREN_TIMES])) / TICK
        with contextlib.suppress(OSError):  # it ended meanwhile
            total += time.clock_gettime((~each << 3) | 2)
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory of the tree now; pages that its processes share count in each."""
    return sum(_status(each, "VmRSS") for each in tree(pid))


def peak_bytes(pid: int) -> int:
    """The sum of the most that each living process of the tree ever had resident."""
    return sum(_status(each, "VmHWM") for each in tree(pid))


def pss_bytes(pid: int) -> int:
    """Proportional set size of the tree now: pages that several processes share count once in all."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text("utf-8").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _stat(pid: int) -> list[str]:
    """The fields after the command's name: state, parent, ...; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _status(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


# -- cores


def cores() -> tuple[set[int], set[int]]:
    """(what the measured system runs on: one core; the others, for mocks and load). With one core alone they share it."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


def pin(pid: int, to: set[int]) -> None:
    """A process that runs, with all its threads."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), to)


@contextlib.contextmanager
def pinned(to: set[int]) -> Iterator[None]:
    """Processes that are started in here inherit these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
