"""The part of one process in the live page: it answers the question sent to all processes.

A question is {"explain": KEY}, or {"cursors": {RING: VERSION}, "after": {PROCESS: TIME}}, the positions of a watcher. Questions
and answers are msgpack. The watcher's process merges the answers: `gateway/features/live_page/broadcast.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.cluster.messages import MessageError
from gateway.features.live_page.feed import Feed
from gateway.features.live_page.sums import RollingSums
from gateway.features.live_page.under_way import rows_under_way
from gateway.request.running import RunningRequests

TOPIC: Final = "live_page"


class LiveView:
    """process: the id of this process during its life. running: the running requests. wall_clock: Unix seconds."""

    def __init__(
        self, process: str, feed: Feed, sums: RollingSums, running: RunningRequests, wall_clock: Callable[[], float]
    ) -> None:
        self.process = process
        self._running = running
        self._wall_clock = wall_clock
        self.feed = feed
        self.sums = sums

    def answer(self, question: bytes, now: float) -> bytes:
        """Raises MessageError."""
        try:
            asked: dict[str, Any] = msgspec.msgpack.decode(question)
            if "explain" in asked:
                return msgspec.msgpack.encode(self.feed.explain(str(asked["explain"])))
            cursors, after = dict(asked["cursors"]), float(asked["after"].get(self.process, float("-inf")))
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise MessageError(str(error)) from error
        self.sums.sample(now)
        page = self.feed.page(cursors, now)
        page["process"] = self.process
        page["samples"] = self.sums.since(after)
        page["replicas"] = self.sums.replicas
        page["under_way"] = rows_under_way(self._running.exchanges, now, self._wall_clock() - now)
        page["pools"] = dict(self.sums.pools())
        return msgspec.msgpack.encode(page)

    def sweep(self, now: float) -> None:
        """To be called about every second."""
        self.feed.sweep(now)
        self.sums.sample(now)

    def __repr__(self) -> str:
        return f"<LiveView {self.process}, {self.feed!r}, {self.sums!r}>"
