"""Real programs on loopback ports: started, waited for by a condition, stopped by their process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.05


def until(condition: Callable[[], T], what: str, deadline_s: float = 120.0) -> T:
    """The first true answer of the condition; fails with `what` when there is none before the deadline."""
    end = time.monotonic() + deadline_s
    while not (answer := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        time.sleep(POLL_S)
    return answer


def answers(url: str) -> bool:
    """Whether the URL answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[subprocess.Popen[bytes]]:
    """The program while the block runs, from the moment that `ready` returns true. Its output goes to `log`."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        until(lambda: process.poll() is not None or ready(), f"{Path(command[0]).name} is ready")
        assert process.poll() is None, f"{' '.join(command)} ended:\n{log.read_text('utf-8', 'replace')}"
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], grace_s: float = 15.0, number: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
