"""Polls a replica's /health, in a process of its own, and has the replica print its stack while an answer is late.

    python -m tests.replica.fuzz.health PORT PID

Prints a line for each answer (`Answer.line`), and ends when its standard output is closed. `ready_s` is other processes' doing:
for how long this process, and that thread of the replica which waited most, were ready to run and did not. (Any thread: the one
that had the interpreter may be the one that waited.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.soak.health import PAUSE_S, Answer, ask, schedule

LATE_S: Final = 0.12


def answers(port: int, pid: int) -> Iterator[Answer]:
    own = os.getpid()
    while True:
        time.sleep(PAUSE_S)
        waited, ours, begun = ready(pid), schedule(own)[1], time.monotonic()
        ran = schedule(pid)[0]
        late = threading.Timer(LATE_S, _print_stack, [pid])
        late.start()
        what = ask(port)
        late.cancel()
        took = time.monotonic() - begun
        most = max((seconds - waited.get(thread, 0.0) for thread, seconds in ready(pid).items()), default=0.0)
        yield Answer(took, schedule(pid)[0] - ran, most + schedule(own)[1] - ours, what)


def ready(pid: int) -> Mapping[str, float]:
    """Seconds that each thread was ready without running; nothing where the kernel does not provide it."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[task.parent.name] = int(task.read_text("ascii").split()[1]) / 1e9
    return found


def _print_stack(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def main() -> None:
    with contextlib.suppress(BrokenPipeError):
        for answer in answers(int(sys.argv[1]), int(sys.argv[2])):
            sys.stdout.write(answer.line() + "\n")
            sys.stdout.flush()
    os._exit(0)  # standard output is gone, and Python would complain of it


if __name__ == "__main__":
    main()
