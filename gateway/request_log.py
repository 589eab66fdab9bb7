"""The line that every request writes: what its way through here costs counts."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.log_output import NOTHING, Output

_MILLISECONDS: Final = [b"%03d" % number for number in range(1000)]


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

    @property
    def dropped(self) -> int:
        """Lines that this process has dropped, those of other loggers too."""
        return self._output.dropped

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
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._time = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat(timespec="seconds")[:-6].encode()
        return b"%b.%b+00:00" % (self._time, _MILLISECONDS[int((now - second) * 1000)])


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
