"""Logging to standard error, as JSON or console text: one line per record, and one per request.

Records of stdlib logging, from the gateway and its libraries, become fields here, `line_format.py` formats them, and
`log_output.py` writes the line. No record can make its formatting raise: `logging` would print a traceback of many lines
instead of the expected line.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final

from gateway.telemetry.line_format import ConsoleLine, LineFormat, json_line, text
from gateway.telemetry.log_output import NO_FIELDS, LogOutput, sink_of
from gateway.telemetry.request_log import RequestLog

# Standard LogRecord attributes; all others come from `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def first_of(key: str, names: Collection[str], limit: int) -> dict[str, object]:
    """The first `limit` names as fields of a line, and the number of the others: lines are bounded."""
    first = [shortened(name) for name in islice(names, limit)]
    return {key: first, f"more_{key}": len(names) - len(first)} if len(names) > len(first) else {key: first}


def shortened(name: str) -> str:
    """At most 100 characters, cut in the middle, because many long names have the same beginning."""
    return name if len(name) <= 100 else f"{name[:60]}...{name[-37:]}"


class LineFormatter(logging.Formatter):
    """time, level, logger, message, `fixed`, then the fields of `extra`."""

    def __init__(self, line: LineFormat = json_line, fixed: Mapping[str, Any] = NO_FIELDS) -> None:
        super().__init__()
        self._line = line
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        return self.line(record).decode()

    def line(self, record: logging.LogRecord) -> bytes:
        """`format`, encoded."""
        fields: dict[Any, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._fixed,
        }
        extras: dict[Any, Any] = vars(record)  # a caller may use any object as a key
        fields.update((key, value) for key, value in extras.items() if key not in _STANDARD)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return self._line(fields)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  (arguments that do not fit their message; any __str__ may be called)
        return f"{text(record.msg)} {text(record.args)}"


class Handler(logging.Handler):
    """Writes records to an output, from any thread; warnings and errors at once."""

    def __init__(self, output: LogOutput, fixed: Mapping[str, Any] = NO_FIELDS, line: LineFormat = json_line) -> None:
        super().__init__()
        self._lines = LineFormatter(line, fixed)
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        self.output.write_record(self._lines.line(record), urgent=record.levelno >= logging.WARNING)

    def flush(self) -> None:
        """Called at process exit. Waits for a stalled reader for END_S at most."""
        self.output.flush()


def configure(level: str, worker: int | None = None, log_format: str = "json") -> RequestLog:
    """Send all logs of this process to standard error. worker: its number, of several; log_format: as in the configuration."""
    fixed = NO_FIELDS if worker is None else {"worker": worker}
    console = log_format == "console" or (log_format == "auto" and _is_terminal())
    line = ConsoleLine(colors=_has_colors()) if console else json_line
    output = LogOutput(sink_of(sys.stderr), shared=worker is not None, fixed=fixed, line=line)
    logging.basicConfig(level=level.upper(), handlers=[Handler(output, fixed, line)], force=True)
    return RequestLog(output, logging.getLevelNamesMapping()[level.upper()], fixed, line)


def _is_terminal() -> bool:
    """True if a person reads standard error. A service's or container's goes to a pipe, a socket or a file."""
    return sys.stderr is not None and sys.stderr.isatty()


def _has_colors() -> bool:
    """True on a terminal without NO_COLOR (https://no-color.org)."""
    return _is_terminal() and not os.environ.get("NO_COLOR")
