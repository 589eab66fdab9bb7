"""The workers' routers, as other gateways see them through the store (`store/link.py`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gateway.cluster.messages import Batch
from gateway.cluster.snapshots.knowledge import MAX_BYTES
from gateway.cluster.snapshots.snapshot import Snapshot

if TYPE_CHECKING:
    from gateway.cluster.workers.hub import Hub


class HubRouters:
    """`Routers` of a link: what it brings goes to all workers, as if it came from one more of them."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def receive(self, source: int, batch: Batch) -> None:
        self._hub.publish(source, batch)

    def leave(self, source: int) -> None:
        self._hub.ended_elsewhere(source)

    def join(self) -> None:
        self._hub.announce_newcomer()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        return await self._hub.collect(since_s, most_bytes)

    async def restore(self, snapshot: Snapshot) -> None:
        await self._hub.restore(snapshot)
