"""Lines on standard error, in batches, and the one that every request writes: what its way through here costs counts."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import select
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import orjson

FLUSH_S: Final = 0.1

NOTHING: Final[Mapping[str, Any]] = {}


class Output:
    """Standard error, written in batches: a system call for every line would cost a request more than its routing.

    Lines wait for FLUSH_S at most while an event loop runs, and not at all without one.
    """

    def __init__(self, stream: BinaryIO, *, shared: bool = False) -> None:
        """shared: other processes write to the same pipe, which keeps writes apart up to PIPE_BUF bytes."""
        self._stream = stream
        self._most = select.PIPE_BUF if shared else sys.maxsize
        self._lines: list[bytes] = []
        self._flushing: asyncio.TimerHandle | None = None

    def write(self, line: bytes) -> None:
        self._lines.append(line)
        if self._flushing is None:
            try:
                self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
            except RuntimeError:  # no loop in this thread
                self.flush()

    def flush(self) -> None:
        if self._flushing:
            self._flushing.cancel()
            self._flushing = None
        lines, self._lines = self._lines, []
        if lines:
            with contextlib.suppress(OSError, ValueError):  # nobody reads the log any more: no reason to stop serving
                for batch in _batches(lines, self._most):
                    self._stream.write(batch)
                    self._stream.flush()


def _batches(lines: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Whole lines, together not longer than `most` bytes unless one alone is."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) + 1 > most:
            yield b"\n".join((*batch, b""))
            batch, size = [], 0
        batch.append(line)
        size += len(line) + 1
    if batch:
        yield b"\n".join((*batch, b""))


class RequestLog:
    """One line a request, like those of the logger "warmroute.request", without the detours of a record."""

    def __init__(self, output: Output, level: int, fixed: Mapping[str, Any] = NOTHING) -> None:
        """level: requests below it are not logged. fixed: fields of every line."""
        self._output = output
        self._level = level
        said = {"logger": "warmroute.request", "message": "request", **fixed}
        self._said = orjson.dumps(said)[1:-1]
        self._second = 0
        self._time = b""

    def write(self, level: int, fields: dict[str, Any]) -> None:
        """fields: not empty."""
        if level < self._level:
            return
        try:
            said = orjson.dumps(fields)
        except TypeError:
            said = orjson.dumps({text(key): fragment(value) for key, value in fields.items()})
        name = "info" if level < logging.WARNING else "warning"
        # As JSON of one dictionary would be, for half the time.
        self._output.write(b'{"time":"%b","level":"%b",%b,%b' % (self._now(), name.encode(), self._said, said[1:]))

    def _now(self) -> bytes:
        """As `JsonFormatter` writes it; what changes once a second is kept."""
        milliseconds = int(time.time() * 1000)
        second = milliseconds // 1000
        if second != self._second:
            self._second = second
            self._time = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat(timespec="seconds")[:-6].encode()
        return b"%b.%03d+00:00" % (self._time, milliseconds - second * 1000)


def fragment(value: Any) -> orjson.Fragment:
    """`value` as JSON, or its text as JSON: orjson refuses a lone surrogate, an int of 65 bits, a key that is no text."""
    try:
        return orjson.Fragment(orjson.dumps(value, default=str))
    except TypeError:
        return orjson.Fragment(orjson.dumps(text(value)))


def text(value: Any) -> str:
    """Of whatever it is, and sound UTF-8."""
    try:
        said = str(value)
    except Exception as error:  # noqa: BLE001  (any __str__ may be called)
        said = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return said.encode("utf-8", "backslashreplace").decode()
