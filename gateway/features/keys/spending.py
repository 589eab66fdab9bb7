"""What keys have used at one worker, for the others: every EXCHANGE_S what has changed, and all of it from and for a new
worker.

A worker that has ended has nothing reserved any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.cluster.commands import LocalControl
from gateway.features.keys.limits.account import Total
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import Gone, Joined, Message, Spent

EXCHANGE_S: Final = 0.05
MAX_SENT: Final = 1000  # totals in one message


class Spending:
    """See the top of this file. It has nothing to do where there are no keys."""

    def __init__(self, local: LocalControl, channel: Channel) -> None:
        self._local = local
        self._channel = channel
        self._joined = True  # this worker
        self._processes: dict[int, str] = {}  # of the other workers
        self._complete = set[int]()  # workers that have sent all of it: what they send now is new

    def receive(self, worker: int, message: Message) -> None:
        """A message from the hub; those about other things are ignored."""
        match message:
            case Spent():
                self._merge(worker, message)
            case Joined():
                self._joined = True
            case Gone():
                self._leave(worker)

    def _merge(self, worker: int, message: Spent) -> None:
        keys = self._local.keys
        if keys is None:
            return
        if worker not in self._processes:
            self._processes[worker] = message.process
            keys.siblings.add(message.process)
        first = message.whole or worker not in self._complete
        keys.limiter.merge(message.process, message.totals, self._local.clock(), first=first)
        if message.whole:
            self._complete.add(worker)

    def _leave(self, worker: int) -> None:
        process, keys = self._processes.pop(worker, None), self._local.keys
        self._complete.discard(worker)
        if process is not None and keys is not None:
            keys.siblings.discard(process)
            keys.limiter.ended(process)

    async def run(self) -> None:
        """Until it is cancelled."""
        keys = self._local.keys
        if keys is None:
            return
        while True:
            await asyncio.sleep(EXCHANGE_S)
            if self._channel.unsent:
                continue  # the hub does not keep up: what has changed goes with the next one
            totals, whole, self._joined = keys.limiter.changes(), self._joined, False
            self._send(keys.process, keys.limiter.totals() if whole else totals, whole=whole)

    def _send(self, process: str, totals: Sequence[Total], *, whole: bool) -> None:
        for at in range(0, max(len(totals), int(whole)), MAX_SENT):
            self._channel.send(Spent(process, whole, tuple(totals[at : at + MAX_SENT])))

    def __repr__(self) -> str:
        return f"<Spending, of {len(self._processes)} others>"
