"""The workers' routers and other gateways, as they see each other: `HubRouters`, and the link (`sharing/link.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from gateway.cluster.messages import Batch
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Snapshot
from gateway.features.workers.hub_knowledge import HubSnapshots


class GatewayLink(Protocol):
    """To other gateways. None of its methods waits or fails."""

    def publish(self, source: int, batch: Batch) -> None:
        """The next events of one of our routers."""

    def reset(self, source: int) -> None:
        """One of our routers has ended, or its events were lost: it has nothing open that was published before."""

    def want_open(self) -> None:
        """A new router of ours does not know what the others have open."""


class HubRouters:
    """`Routers` of a link: what it brings goes to all workers, as if it came from one more of them."""

    def __init__(
        self,
        *,
        publish: Callable[[int, Batch], None],
        ended: Callable[[int], None],
        announce: Callable[[], None],
        snapshots: HubSnapshots,
    ) -> None:
        """Methods of the hub: `publish`, `ended_elsewhere`, `announce_newcomer`."""
        self._publish = publish
        self._ended = ended
        self._announce = announce
        self._snapshots = snapshots

    def receive(self, source: int, batch: Batch) -> None:
        self._publish(source, batch)

    def leave(self, source: int) -> None:
        self._ended(source)

    def join(self) -> None:
        self._announce()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        return await self._snapshots.collect(since_s, most_bytes)

    async def restore(self, snapshot: Snapshot) -> None:
        await self._snapshots.restore(snapshot)
