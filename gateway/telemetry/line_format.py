"""Formats the fields of a log line as JSON, or as console text.

Fields may come from clients and replicas (a header's bytes, a count), so no value can make these functions raise, begin a new
line, or control a terminal. Only a value that JSON cannot represent is written as its text.

Console text is structlog's, which is imported only for this format: it takes some tens of milliseconds and 5 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

LineFormat = Callable[[Mapping[Any, Any]], bytes]
"""Fields (first time, level, logger and message) -> a line without its line end."""


def json_line(fields: Mapping[Any, Any]) -> bytes:
    """One JSON object."""
    try:
        return orjson.dumps(fields, default=str)
    except TypeError:
        return orjson.dumps({text(key): _fragment(value) for key, value in fields.items()})


class ConsoleLine:
    """`time [level] message key=value`, optionally in colours; a traceback follows on its own lines."""

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
    """str() of any value, as valid UTF-8. Never raises."""
    try:
        written = str(value)
    except Exception as error:  # noqa: BLE001  (any __str__ may be called)
        written = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return written.encode("utf-8", "backslashreplace").decode()


def _fragment(value: Any) -> orjson.Fragment:
    """`value` as JSON, or its text as JSON: orjson refuses lone surrogates, ints above 64 bits, keys that are not strings."""
    try:
        return orjson.Fragment(orjson.dumps(value, default=str))
    except TypeError:
        return orjson.Fragment(orjson.dumps(text(value)))


def _printable(value: Any) -> str:
    return _escaped(text(value))


def _escaped(written: str) -> str:
    """The text with control characters escaped."""
    return written if written.isprintable() else repr(written)[1:-1]
