"""The log line of each request, written millions of times: its JSON is assembled here without a log record."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.telemetry.line_format import LineFormat, json_line
from gateway.telemetry.log_output import NO_FIELDS, LogOutput

_MILLISECONDS: Final = [b"%03d" % number for number in range(1000)]


class RequestLog:
    """One line per request, in the form of the logger "warmroute.request"."""

    def __init__(
        self, output: LogOutput, level: int, fixed: Mapping[str, Any] = NO_FIELDS, line: LineFormat = json_line
    ) -> None:
        """level: requests below it are not logged. fixed: fields of every line."""
        self._output = output
        self._level = level
        self._head = {"logger": "warmroute.request", "message": "request", **fixed}
        self._head_json = orjson.dumps(self._head)[1:-1]
        self._line = line
        self._is_json = line is json_line
        self._second = 0
        self._time = b""

    @property
    def dropped(self) -> int:
        """Lines dropped by this process, other loggers' included."""
        return self._output.dropped

    def write(self, level: int, fields: dict[str, Any]) -> None:
        """fields: not empty."""
        if level < self._level:
            return
        name = "info" if level < logging.WARNING else "warning"
        if self._is_json:  # the same bytes as one dictionary's JSON, in half the time
            line = b'{"time":"%b","level":"%b",%b,%b' % (self._now(), name.encode(), self._head_json, json_line(fields)[1:])
        else:
            line = self._line({"time": self._now().decode(), "level": name, **self._head, **fields})
        self._output.write(line)

    def _now(self) -> bytes:
        """As `LineFormatter` writes it; the part up to the second is cached."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._time = datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat(timespec="seconds")[:-6].encode()
        return b"%b.%b+00:00" % (self._time, _MILLISECONDS[int((now - second) * 1000)])
