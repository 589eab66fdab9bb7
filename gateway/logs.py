"""JSON logs: one object a line on standard error, one line per request.

What is logged comes from clients and replicas too (a header's bytes, a count), so nothing in a record can make `format`
raise: `logging` would print a traceback of many lines where a line of JSON is expected. A value that JSON has no place for
is written as its text, and only that value.
"""

from __future__ import annotations

import datetime
import logging
import sys
from typing import Any

import orjson

# What every LogRecord has; whatever else is in it came through `extra` and is data.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, then the fields of `extra`. Always one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
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


def configure(level: str) -> None:
    """Send all logs of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
