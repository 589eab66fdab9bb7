"""Waits for the end of runs in other processes. One query asks for all of them (`runs.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Final

from gateway.errors import GatewayError
from gateway.features.runs.event_log import Key
from gateway.features.runs.places import RunPlaces

MAX_WATCHED: Final = 1000  # waiting followers


class WatchedRuns:
    """The runs that followers wait for. Each follower takes a place, so that one client cannot have all of them."""

    def __init__(self) -> None:
        self.places = RunPlaces(MAX_WATCHED, MAX_WATCHED)
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}

    async def wait_for_end(self, key: Key, client: str) -> None:
        """Waits until the run has ended. client: the address of the follower. Raises GatewayError 429."""
        if not self.places.admit(key[0], client):
            text = "Too many responses are followed here. Poll this one instead."
            raise GatewayError(429, "too_many_followed", text, retry_after_s=1)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiter)
        try:
            await waiter
        finally:
            self.places.release(key[0], client)
            waiting = self._waiting.get(key, [])
            if waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiting[key]

    def keys(self) -> list[Key]:
        """At most MAX_WATCHED."""
        return list(self._waiting)

    def end(self, key: Key) -> None:
        for waiter in self._waiting.pop(key, []):
            if not waiter.done():
                waiter.set_result(None)

    def end_missing(self, running: Container[Key], asked: list[Key]) -> None:
        """Ends the waits for all asked runs that are not running."""
        for key in asked:
            if key not in running:
                self.end(key)

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Watched {len(self._waiting)} runs, {self.places!r}>"
