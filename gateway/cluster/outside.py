"""What the routers of this gateway have beside each other: the link to other gateways, and the file that the next start reads.

Either may be missing. At the start a snapshot of a sibling goes before the file, which is older; unless that sibling has only a
part itself yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gateway.cluster.snapshots.keeper import Keeper, SnapshotFile
from gateway.cluster.snapshots.snapshot import KnowledgeError, Snapshot, format_of
from gateway.cluster.store.incoming import Routers
from gateway.cluster.store.link import Link
from gateway.cluster.store.outbox import MOST_BYTES
from gateway.config.listen import OFF
from gateway.config.schema import Config
from gateway.telemetry.metrics import Metrics

log = logging.getLogger("warmroute.snapshots")

AGAIN_S = 1.0

T = TypeVar("T")


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

    async def first(self) -> Snapshot | None:
        """What to begin with."""
        found = await self.link.first() if self.link else None
        if found and not found.header.partial:
            return found
        return (await self._keeper.read() if self._keeper else None) or found

    def ignored(self, error: KnowledgeError) -> None:
        """What was to begin with is of no use."""
        if self._keeper:
            self._keeper.ignore(error)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.link, self._keeper):
                if part:
                    group.create_task(_guarded(part.run))

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


async def _guarded(run: Callable[[], Awaitable[None]]) -> None:
    """For ever: a bug in one must not end the other."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("sharing or keeping what is known failed")
        await asyncio.sleep(AGAIN_S)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work; None, and the work is cancelled, if the event is set before."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
