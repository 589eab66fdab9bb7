"""Totals of what keys have used at one worker, for the others: every EXCHANGE_S those that have changed, and all of them from
and for a new worker.

A worker that has ended has nothing reserved any more.
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


class Spending:
    """See the top of this file. process: the id of this one; siblings: those of the others."""

    def __init__(self, process: str, limiter: Limiter, siblings: set[str], topics: Topics, clock: Callable[[], float]) -> None:
        self._process = process
        self._limiter = limiter
        self._siblings = siblings
        self._clock = clock
        self._joined = True  # this worker
        self._processes: dict[int, str] = {}  # of the other workers
        self._complete = set[int]()  # workers that have sent all of their totals: what they send now is new
        topics.receives(TOPIC, self.receive)
        topics.follows(self._join, self.leave)

    def _join(self) -> None:
        self._joined = True

    def receive(self, worker: int, message: bytes) -> None:
        """Totals of another worker. Raises MessageError."""
        process, whole, totals = decode(_MESSAGE, message)
        if worker not in self._processes:
            self._processes[worker] = process
            self._siblings.add(process)
        self._limiter.merge(process, totals, self._clock(), first=whole or worker not in self._complete)
        if whole:
            self._complete.add(worker)

    def leave(self, worker: int) -> None:
        process = self._processes.pop(worker, None)
        self._complete.discard(worker)
        if process is not None:
            self._siblings.discard(process)
            self._limiter.ended(process)

    async def run(self, control: ControlPlane) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(EXCHANGE_S)
            if control.unsent:
                continue  # the hub does not keep up: what has changed goes with the next message
            totals, whole, self._joined = self._limiter.changes(), self._joined, False
            for message in messages_of(self._process, self._limiter.totals() if whole else totals, whole=whole):
                control.publish(TOPIC, message)

    def __repr__(self) -> str:
        return f"<Spending, of {len(self._processes)} others>"


def messages_of(process: str, totals: Sequence[Total], *, whole: bool) -> Iterator[bytes]:
    """whole: these are all totals of the process; there is a message then even if there are none."""
    for at in range(0, max(len(totals), int(whole)), MAX_SENT):
        yield msgspec.msgpack.encode((process, whole, totals[at : at + MAX_SENT]))
