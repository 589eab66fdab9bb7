"""What the routers of this gateway have beside each other: the link to other gateways, and the file that the next start reads.

Either may be missing. At the start a sibling's snapshot goes before the file, which is older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.cluster.snapshots.keeper import Keeper, SnapshotFile
from gateway.cluster.snapshots.snapshot import KnowledgeError, Snapshot, format_of
from gateway.cluster.store.incoming import Routers
from gateway.cluster.store.link import Link
from gateway.cluster.store.outbox import MOST_BYTES
from gateway.config.listen import OFF
from gateway.config.schema import Config
from gateway.telemetry.metrics import Metrics


class Outside:
    """See the top of this file. `run` is to be a task, from before `first` until after `close`."""

    def __init__(
        self,
        config: Config,
        routers: Routers,
        metrics: Metrics,
        file: SnapshotFile | None,
        clock: Callable[[], float],
        unsent_bytes: int = MOST_BYTES,
    ) -> None:
        """file: None: there is none. unsent_bytes: see Link."""
        self.link: Link | None = None
        if config.sharing.url != OFF:
            block_format = format_of(config.routing)
            self.link = Link(config.sharing, block_format, routers, metrics, clock=clock, unsent_bytes=unsent_bytes)
        self._keeper = Keeper(file, routers.collect, metrics) if file else None
        self._clock = clock

    async def first(self) -> tuple[Snapshot, float] | None:
        """What to begin with, and its moment."""
        if self.link and (found := await self.link.first()):
            return found
        if self._keeper and (read := await self._keeper.read()):
            snapshot, age_s = read
            return snapshot, self._clock() - age_s
        return None

    def ignored(self, error: KnowledgeError) -> None:
        """What was to begin with is of no use."""
        if self._keeper:
            self._keeper.ignore(error)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.link, self._keeper):
                if part:
                    group.create_task(part.run())

    async def keep(self) -> None:
        """The requests are over: write what the next start should know."""
        if self._keeper:
            await self._keeper.write_last()

    async def close(self) -> None:
        """The last events were published."""
        if self.link:
            await self.link.close()

    def __repr__(self) -> str:
        return f"<Outside: {self.link!r}, {self._keeper!r}>"
