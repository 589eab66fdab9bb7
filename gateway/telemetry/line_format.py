"""The fields of a log line -> the line: JSON, or text for people.

What is logged comes from clients and replicas too (a header's bytes, a count), so nothing in the fields can make these
functions raise, and no value can begin a new line or control a terminal. A value that JSON has no place for is written as its
text, and only that value.

The text for people is structlog's, which is imported only for this format: it takes some tens of milliseconds and 5 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

Line = Callable[[Mapping[Any, Any]], bytes]
"""Fields, the first of them time, level, logger and message, as a line without its end."""


def json_line(fields: Mapping[Any, Any]) -> bytes:
    """One JSON object."""
    try:
        return orjson.dumps(fields, default=str)
    except TypeError:
        return orjson.dumps({text(key): _fragment(value) for key, value in fields.items()})


class ConsoleLine:
    """`time [level] message key=value`, in colours on request; a traceback follows in lines of its own."""

    def __init__(self, *, colors: bool) -> None:
        from structlog.dev import ConsoleRenderer, plain_traceback

        self._render = ConsoleRenderer(
            colors=colors,
            sort_keys=False,
            event_key="message",
            timestamp_key="time",
            exception_formatter=plain_traceback,
        )

    def __call__(self, fields: Mapping[Any, Any]) -> bytes:
        shown = {_printable(text(key)): _printable(value) for key, value in fields.items()}
        if "traceback" in fields:
            del shown["traceback"]
            shown["exception"] = "\n".join(_escaped(line) for line in text(fields["traceback"]).split("\n"))
        return str(self._render(None, "", shown)).encode()


def text(value: Any) -> str:
    """Of any value, as sound UTF-8."""
    try:
        written = str(value)
    except Exception as error:  # noqa: BLE001  (any __str__ may be called)
        written = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return written.encode("utf-8", "backslashreplace").decode()


def _fragment(value: Any) -> orjson.Fragment:
    """`value` as JSON, or its text as JSON: orjson refuses a lone surrogate, an int of 65 bits, a key that is no text."""
    try:
        return orjson.Fragment(orjson.dumps(value, default=str))
    except TypeError:
        return orjson.Fragment(orjson.dumps(text(value)))


def _printable(value: Any) -> str:
    return _escaped(text(value))


def _escaped(written: str) -> str:
    """Without control characters."""
    return written if written.isprintable() else repr(written)[1:-1]
