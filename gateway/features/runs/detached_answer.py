"""An answer that does not depend on its client's connection: its head, and a log of the pieces for its followers.

begin ──► add, add, ... ──► finish                 followers: `answer_followers.py`
  or finish, without a head: there is no answer
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.errors import GatewayError
from gateway.features.runs.event_log import EventLog, Key, Logs
from gateway.features.runs.passing import Gate
from gateway.upstream.client import PausableSource
from router.native import mypyc_attr

_STREAM: Final = re.compile(rb"(?:^|\r\n)content-type: ?text/event-stream", re.IGNORECASE)


@mypyc_attr(allow_interpreted_subclasses=True)
class DetachedAnswer:
    """log_key: of its log. begun: set when the head of its answer is known, or it has ended. status, lines: of the head; 0:
    there is none. streams: it is of a stream. complete: it has a regular end. broken: that is an error event.
    stopped: the reason, if it was stopped.

    A follower that does not read pauses the source of the log, if it has one (`feed_from`).
    """

    def __init__(self, log_key: Key, logs: Logs, lease: MemoryLease, clock: Callable[[], float]) -> None:
        """lease: of its log. clock: seconds, the same as in `Logs.expire`."""
        self.log_key = log_key
        self.log: EventLog = logs.open(log_key, lease)
        self.begun = asyncio.Event()
        self.status, self.lines = 0, b""
        self.streams = self.complete = self.broken = False
        self.stopped: GatewayError | None = None
        self._logs = logs
        self._clock = clock
        self._finished = self._paused = False
        self._source: PausableSource | None = None

    @property
    def finished(self) -> bool:
        """True if nothing follows in the log."""
        return self._finished

    @property
    def failed(self) -> bool:
        """True if it has ended, and is an error or has broken off."""
        return self._finished and (self.broken or not (self.complete and self.status == 200))

    def begin(self, status: int, lines: bytes) -> None:
        """The head of the answer is known."""
        self.status, self.lines, self.streams = status, lines, _STREAM.search(lines) is not None
        self.begun.set()

    def add(self, data: bytes) -> None:
        if data:
            self._logs.add(self.log, data)

    def finish(self, *, complete: bool) -> None:
        """Nothing follows in the log. Idempotent."""
        if not self._finished:
            self._finished, self.complete = True, complete
            self._logs.end(self.log_key, self._clock())
        self.begun.set()

    def feed_from(self, source: PausableSource | None) -> None:
        """Set the source that feeds the log: the replica's answer."""
        self._source = source
        if source is not None and self._paused:
            source.pause()

    def pause(self) -> None:
        """Its follower does not read."""
        self._paused = True
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        self._paused = False
        if self._source is not None:
            self._source.resume()

    @property
    def state(self) -> str:
        """For its representation."""
        return "stopped" if self.stopped else "ended" if self._finished else "running"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.log_key[1]}, {self.state}, {self.log!r}>"


class FollowerGate(Gate):
    """The gate of a follower, which pauses the generation, too."""

    def __init__(self, run: DetachedAnswer) -> None:
        super().__init__()
        self._run = run

    def pause(self) -> None:
        super().pause()
        self._run.pause()

    def resume(self) -> None:
        super().resume()
        self._run.resume()
