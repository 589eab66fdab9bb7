"""A gateway of one process, with its prefix index in a file and shared with other gateways, if configured."""

from __future__ import annotations

import logging
import math

from gateway.cluster.commands import LocalControl, SingleProcess
from gateway.cluster.messages import EventBatch
from gateway.cluster.replication import Subscriber
from gateway.features.sharing.link import Link, link_of
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.outbox import MAX_UNSENT_BYTES
from gateway.features.sharing.state import TOPIC
from gateway.features.snapshots.keeper import SnapshotFile
from gateway.features.snapshots.knowledge import MAX_BYTES, Knowledge
from gateway.features.snapshots.single_process import knowledge_of
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot

log = logging.getLogger("warmroute.sharing")

SOURCE = 1


def single_process(
    local: LocalControl, *, snapshot: SnapshotFile | None = None, unsent_bytes: int = MAX_UNSENT_BYTES
) -> SingleProcess:
    """snapshot: the file to read at the start and to write at the end. unsent_bytes: see Link."""
    knowledge = Knowledge(local)
    transport = StoreTransport(knowledge)
    link = transport.link = link_of(local.live.config, transport, local.metrics.of(SharingMetrics), local.clock, unsent_bytes)
    if link:
        local.topics.answers(TOPIC, link.describe)
    return SingleProcess(local, knowledge_of(local, knowledge, snapshot, link), transport if link else None)


class StoreTransport:
    """A `ReplicationTransport`, and the `Routers` of its link."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.link: Link | None = None  # set before the first event
        self._knowledge = knowledge
        self._subscriber: Subscriber | None = None

    # -- for the router

    @property
    def unsent(self) -> int:
        """Always 0, because the link has its own bound."""
        return 0

    def publish(self, batch: EventBatch) -> None:
        if self.link:
            self.link.publish(SOURCE, batch)

    def snapshot(self, batch: EventBatch) -> None:
        if self.link:
            self.link.reset(SOURCE)
        self.publish(batch)

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    # -- for the link

    def receive(self, source: int, batch: EventBatch) -> None:
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
            log.warning("a snapshot of another gateway was not applied", extra={"error": str(error)})
