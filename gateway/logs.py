"""JSON logs: one object a line on standard error, one line per request.

What is logged comes from clients and replicas too (a header's bytes, a count), so nothing in a record can make `format`
raise: `logging` would print a traceback of many lines where a line of JSON is expected. A value that JSON has no place for
is written as its text, and only that value.
"""

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

_NOTHING: Mapping[str, Any] = {}

# What every LogRecord has; whatever else is in it came through `extra` and is data.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, `fixed`, then the fields of `extra`. Always one line of JSON."""

    def __init__(self, fixed: Mapping[str, Any] = _NOTHING) -> None:
        super().__init__()
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        line: dict[Any, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._fixed,
        }
        extras: dict[Any, Any] = vars(record)  # whatever a caller takes for a name
        line.update((key, value) for key, value in extras.items() if key not in _STANDARD)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=str).decode()
        except TypeError:
            return orjson.dumps({_text(key): _fragment(value) for key, value in line.items()}).decode()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  (arguments that do not fit their message; any __str__ may be called)
        return f"{_text(record.msg)} {_text(record.args)}"


def _fragment(value: Any) -> orjson.Fragment:
    """`value` as JSON, or its text as JSON: orjson refuses a lone surrogate, an int of 65 bits, a key that is no text."""
    try:
        return orjson.Fragment(orjson.dumps(value, default=str))
    except TypeError:
        return orjson.Fragment(orjson.dumps(_text(value)))


def _text(value: Any) -> str:
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001  (any __str__ may be called)
        text = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return text.encode("utf-8", "backslashreplace").decode()


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


class Handler(logging.Handler):
    """Records to an output; what is worth a warning goes out at once."""

    def __init__(self, output: Output, fixed: Mapping[str, Any] = _NOTHING) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(fixed))
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        self.output.write(self.format(record).encode())
        if record.levelno >= logging.WARNING:
            self.output.flush()

    def flush(self) -> None:
        self.output.flush()


class RequestLog:
    """One line a request, like those of the logger "warmroute.request", without the detours of a record."""

    def __init__(self, output: Output, level: int, fixed: Mapping[str, Any] = _NOTHING) -> None:
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
            said = orjson.dumps({_text(key): _fragment(value) for key, value in fields.items()})
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


def configure(level: str, worker: int | None = None) -> RequestLog:
    """Send all logs of this process to standard error as JSON lines. worker: which one of several it is."""
    fixed = _NOTHING if worker is None else {"worker": worker}
    output = Output(sys.stderr.buffer, shared=worker is not None)
    logging.basicConfig(level=level.upper(), handlers=[Handler(output, fixed)], force=True)
    return RequestLog(output, logging.getLevelNamesMapping()[level.upper()], fixed)
