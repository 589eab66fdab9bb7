"""Connects the workers' routers to other gateways. To the workers, another gateway's router is like one more worker."""

from __future__ import annotations

import math

from gateway.cluster.messages import EventBatch
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Snapshot
from gateway.features.workers.hub import Hub


class HubRouters:
    """`Routers` of a link."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def receive(self, source: int, batch: EventBatch) -> None:
        self._hub.publish(source, batch)

    def leave(self, source: int) -> None:
        self._hub.end_router(source)

    def join(self) -> None:
        self._hub.publish_open_bookings()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        return await self._hub.snapshots.collect(since_s, most_bytes)

    async def restore(self, snapshot: Snapshot) -> None:
        await self._hub.snapshots.restore(snapshot)
