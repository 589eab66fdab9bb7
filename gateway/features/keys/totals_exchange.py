"""Exchanges the totals of keys among the workers of one gateway.

Every EXCHANGE_S a worker publishes the totals that have changed. It publishes all its totals after a worker has joined, and so
does the new worker. The reservations of a worker end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from gateway.cluster.commands import ControlPlane
from gateway.cluster.messages import decode
from gateway.cluster.topics import Topics
from gateway.features.keys.limits.account import Total
from gateway.features.keys.limits.limiter import Limiter

TOPIC: Final = "keys.spent"
EXCHANGE_S: Final = 0.05
MAX_SENT: Final = 1000  # totals in one message

_MESSAGE: Final = msgspec.msgpack.Decoder(tuple[str, bool, tuple[Total, ...]])


class TotalsExchange:
    """process: the id of this process. siblings: the ids of the other workers' processes, maintained here."""

    def __init__(self, process: str, limiter: Limiter, siblings: set[str], topics: Topics, clock: Callable[[], float]) -> None:
        self._process = process
        self._limiter = limiter
        self._siblings = siblings
        self._clock = clock
        self._joined = True  # a worker, possibly this one, has joined since the last message
        self._processes: dict[int, str] = {}  # process ids of the other workers
        self._complete = set[int]()  # workers that have sent all their totals; later totals are recent use
        topics.receives(TOPIC, self.receive)
        topics.follows(self._join, self.leave)

    def _join(self) -> None:
        self._joined = True

    def receive(self, worker: int, message: bytes) -> None:
        """Merges totals of another worker. Raises MessageError."""
        process, complete, totals = decode(_MESSAGE, message)
        if worker not in self._processes:
            self._processes[worker] = process
            self._siblings.add(process)
        self._limiter.merge(process, totals, self._clock(), first=complete or worker not in self._complete)
        if complete:
            self._complete.add(worker)

    def leave(self, worker: int) -> None:
        process = self._processes.pop(worker, None)
        self._complete.discard(worker)
        if process is not None:
            self._siblings.discard(process)
            self._limiter.release_process(process)

    async def run(self, control: ControlPlane) -> None:
        """Publishes until cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_S)
            if control.unsent:
                continue  # the hub is behind: the next message will include these changes
            totals, complete, self._joined = self._limiter.changes(), self._joined, False
            for message in encode_totals(self._process, self._limiter.totals() if complete else totals, complete=complete):
                control.publish(TOPIC, message)

    def __repr__(self) -> str:
        return f"<TotalsExchange, of {len(self._processes)} others>"


def encode_totals(process: str, totals: Sequence[Total], *, complete: bool) -> Iterator[bytes]:
    """complete: these are all totals of the process; then there is at least one message, possibly without totals."""
    for start in range(0, max(len(totals), int(complete)), MAX_SENT):
        yield msgspec.msgpack.encode((process, complete, totals[start : start + MAX_SENT]))
