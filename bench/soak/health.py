"""Polls a gateway's /health, in a separate process: the load and the hostile clients do not delay it.

    python -m bench.soak.health PORT PID

Each question goes over a connection of its own. It prints a line for each (`Answer`) and ends when its standard output is
closed. On a busy machine an answer is late for two reasons. So the kernel's count of the gateway's main thread is read, too
(/proc/PID/schedstat): how long it ran meanwhile, which is the gateway's own doing, and how long it was ready and did not run,
because other processes had its core.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

PAUSE_S = 0.005
PATIENCE_S = 60.0
REQUEST = b"GET /health HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n"
OK = "200"


@dataclass(frozen=True, slots=True)
class Answer:
    """took_s: from connecting to the answer's end. ran_s, ready_s: of these, what the gateway's main thread ran, and was ready
    and did not run. what: "200", another status, or the name of an error.
    """

    took_s: float
    ran_s: float
    ready_s: float
    what: str

    def line(self) -> str:
        return f"{self.took_s:.6f} {self.ran_s:.6f} {self.ready_s:.6f} {self.what}"

    @staticmethod
    def of(line: str) -> Answer:
        took, ran, ready, what = line.split()
        return Answer(float(took), float(ran), float(ready), what)


def ask(port: int) -> str:
    """The status of one answer, or the name of the error that came instead."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
            sock.sendall(REQUEST)
            data = b""
            while part := sock.recv(65536):
                data += part
    except OSError as error:
        return type(error).__name__
    return data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.1 ") else "NoAnswer"


def schedule(pid: int) -> tuple[float, float]:
    """Seconds that its main thread ran and was ready without running; zeros where the kernel does not provide it."""
    try:
        ran, ready, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(ready) / 1e9


def answers(port: int, pid: int) -> Iterator[Answer]:
    while True:
        time.sleep(PAUSE_S)
        (ran, ready), begun = schedule(pid), time.monotonic()
        what = ask(port)
        took, after = time.monotonic() - begun, schedule(pid)
        yield Answer(took, after[0] - ran, after[1] - ready, what)


def watch(port: int, pid: int, out: TextIO) -> None:
    with contextlib.suppress(BrokenPipeError):
        for answer in answers(port, pid):
            print(answer.line(), file=out, flush=True)


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(-10)  # where it is allowed: what is measured is the gateway, not the load beside it
    watch(int(sys.argv[1]), int(sys.argv[2]), sys.stdout)
    os._exit(0)  # standard output is gone, and Python would complain of it


if __name__ == "__main__":
    main()
