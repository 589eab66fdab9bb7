"""Replication through the store, of a gateway that is one process: its one router, and what it knows."""

from __future__ import annotations

import logging
import math

from gateway.cluster.messages import Batch
from gateway.cluster.replication import Subscriber
from gateway.features.sharing.link import Link
from gateway.features.snapshots.knowledge import MAX_BYTES, Knowledge
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot

log = logging.getLogger("warmroute.sharing")

SOURCE = 1


class StoreTransport:
    """A `ReplicationTransport`, and the `Routers` of its link."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.link: Link | None = None
        self._knowledge = knowledge
        self._subscriber: Subscriber | None = None

    # -- of the router

    @property
    def unsent(self) -> int:
        """None is ever dropped here: the link has a bound of its own."""
        return 0

    def publish(self, batch: Batch) -> None:
        if self.link:
            self.link.publish(SOURCE, batch)

    def snapshot(self, batch: Batch) -> None:
        if self.link:
            self.link.reset(SOURCE)
        self.publish(batch)

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    # -- of the link

    def receive(self, source: int, batch: Batch) -> None:
        if self._subscriber:
            self._subscriber.receive(source, batch)

    def leave(self, source: int) -> None:
        if self._subscriber:
            self._subscriber.leave(source)

    def join(self) -> None:
        if self._subscriber:
            self._subscriber.join()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        return await self._knowledge.collect(since_s, most_bytes)

    async def restore(self, snapshot: Snapshot) -> None:
        try:
            await self._knowledge.restore(snapshot)
        except KnowledgeError as error:
            log.warning("a snapshot of another gateway is not taken in", extra={"error": str(error)})
