"""Events of a log on their way to one client: they wait for a slow client, but the log does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.errors import ClientStalled, GatewayError
from gateway.features.runs.event_log import EventLog
from gateway.request.client import ClientReply
from gateway.request.pulses import STEPS
from gateway.upstream.client import PausableSource

FIRST: Final = -1  # the number before the first event


class Gate(PausableSource):
    """Open while the client reads fast enough."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def wait_open(self, patience_s: float) -> None:
        """Raises ClientStalled after patience_s."""
        if self._open.is_set():
            await asyncio.sleep(0)  # others have their turn
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._open.wait()
        except TimeoutError:
            raise ClientStalled(f"the client has not read for {patience_s:g} s") from None


class PulsedReply:
    """Writes the events of a stream, and a sign of life after each `every_s` without one, unless the client does not read.
    every_s: 0: no signs of life. pulse: makes one.
    """

    def __init__(self, reply: ClientReply, every_s: float, pulse: Callable[[], bytes]) -> None:
        self._reply = reply
        self._every_s = every_s
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._check) if every_s else None

    def write(self, data: bytes) -> None:
        """Raises ConnectionError if the client has left."""
        self._reply.write(data)
        self._sent_at = self._loop.time()

    def close(self) -> None:
        """No more signs of life. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        left_s = self._sent_at + self._every_s - self._loop.time()
        if left_s <= 0 and self._reply.flows:
            try:
                self.write(self._pulse())
            except ConnectionError:
                return  # its request is cancelled
            left_s = self._every_s
        self._timer = self._loop.call_later(max(left_s, self._every_s / STEPS), self._check)


async def pass_events(log: EventLog, after: int, write: Callable[[bytes, int], None], gate: Gate, patience_s: float) -> None:
    """Writes the events after number `after` as they arrive, until the log has ended. write: called with events, and with the
    number of the last of these events. gate: of the reply.

    Raises ClientStalled, and GatewayError 410 for a client that is too slow.
    """
    while True:
        await gate.wait_open(patience_s)
        found = log.since(after)
        if found is None:
            raise GatewayError(410, "events_gone", "The client was too slow: its next events have been dropped.")
        data, after = found
        if data:
            write(data, after)
        elif log.ended:
            return
        else:
            await log.changed()
