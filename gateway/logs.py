"""JSON logs: one object a line on standard error, one line per request.

What is logged comes from clients and replicas too (a header's bytes, a count), so nothing in a record can make `format`
raise: `logging` would print a traceback of many lines where a line of JSON is expected. A value that JSON has no place for
is written as its text, and only that value.
"""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final

import orjson

from gateway.log_output import NOTHING, Output, sink_of
from gateway.request_log import RequestLog, fragment, text

# What every LogRecord has; whatever else is in it came through `extra` and is data.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def first_of(key: str, names: Collection[str], most: int) -> dict[str, object]:
    """The first `most` names as fields of a line, and how many more there are: lines are bounded."""
    first = [shortened(name) for name in islice(names, most)]
    return {key: first, f"more_{key}": len(names) - len(first)} if len(names) > len(first) else {key: first}


def shortened(name: str) -> str:
    """At most 100 characters of it. What is left out is in the middle: many long names begin alike."""
    return name if len(name) <= 100 else f"{name[:60]}...{name[-37:]}"


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, `fixed`, then the fields of `extra`. Always one line of JSON."""

    def __init__(self, fixed: Mapping[str, Any] = NOTHING) -> None:
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
            return orjson.dumps({text(key): fragment(value) for key, value in line.items()}).decode()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  (arguments that do not fit their message; any __str__ may be called)
        return f"{text(record.msg)} {text(record.args)}"


class Handler(logging.Handler):
    """Records to an output, from any thread; what is worth a warning goes out at once."""

    def __init__(self, output: Output, fixed: Mapping[str, Any] = NOTHING) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(fixed))
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        self.output.write_record(self.format(record).encode(), urgent=record.levelno >= logging.WARNING)

    def flush(self) -> None:
        """At the end of the process: it waits for a reader that stalls, but not for long."""
        self.output.flush()


def configure(level: str, worker: int | None = None) -> RequestLog:
    """Send all logs of this process to standard error as JSON lines. worker: which one of several it is."""
    fixed = NOTHING if worker is None else {"worker": worker}
    output = Output(sink_of(sys.stderr), shared=worker is not None, fixed=fixed)
    logging.basicConfig(level=level.upper(), handlers=[Handler(output, fixed)], force=True)
    return RequestLog(output, logging.getLevelNamesMapping()[level.upper()], fixed)
