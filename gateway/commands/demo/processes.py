"""The demo's processes: replicas and gateways, started like a user's, each stopped by its own pid."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson

START_S = 300.0  # the first start loads torch and the model from a cold disk
STOP_S = 15.0


class DemoError(Exception):
    """The demo cannot continue; the message has the reason."""


class Process:
    """One `warmroute` command in a separate process; its standard error is read line by line."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._over = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway", *arguments],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, find: Callable[[str], Any], timeout_s: float = START_S) -> Any:
        """The first true `find(line)`. Raises DemoError if the process ends or the time is up before."""
        seen, end = 0, time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if found := find(line):
                        return found
                seen = len(self._lines)
                if self._over or not self._changed.wait(max(0.0, end - time.monotonic())):
                    why = "ended" if self._over else "was silent"
                    raise DemoError(f"{self.name} {why}; its last lines:\n  " + "\n  ".join(self._lines[-8:]))

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int:
        """Wait for the process to end by itself."""
        return self._process.wait(STOP_S)

    def stop(self) -> None:
        """Terminate the process, kill it if it does not end; idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_S)
        assert self._process.stderr is not None
        self._process.stderr.close()


def ready_url(line: str) -> str:
    """The URL in a replica's ready line, "" in any other line."""
    return line.rpartition("ready on ")[2].strip() if "ready on http" in line else ""


def listening_url(line: str) -> str:
    """The clients' URL in a gateway's listening line, "" in any other line."""
    event = log_line(line)
    return str(event.get("url")) if event.get("message") == "listening" else ""


def admin_url(line: str) -> str:
    """The operators' URL in a gateway's listening line, "" in any other line."""
    event = log_line(line)
    return str(event.get("admin_url", "")) if event.get("message") == "listening" else ""


def log_line(line: str) -> dict[str, Any]:
    """A gateway's log line as an object; {} for any other line."""
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}
