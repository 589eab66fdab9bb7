"""What the routers of this gateway have beside each other: the link to other gateways, and the file that the next start reads.

Either may be missing. At the start a snapshot of a sibling goes before the file, which is older. Where it is much smaller the
sibling knows little itself (it began alone, a while ago) or has only a part yet: then the file is taken in, and the sibling's
beside it. Not always, for what is older than the newest of the file would then seem as new as that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from gateway.config.listen import OFF
from gateway.config.schema import Config
from gateway.features.sharing.incoming import Routers
from gateway.features.sharing.link import Link
from gateway.features.sharing.outbox import MOST_BYTES
from gateway.features.snapshots.keeper import Keeper, SnapshotFile
from gateway.features.snapshots.snapshot import Snapshot, format_of
from gateway.tasks import for_ever
from gateway.telemetry.metrics import Metrics

log = logging.getLogger("warmroute.snapshots")

MUCH: Final = 0.8  # of the file: a sibling that knows less than that does not go before it


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
        self._format = format_of(config.routing)
        if config.sharing.url != OFF:
            self.link = Link(config.sharing, self._format, routers, metrics, clock=clock, unsent_bytes=unsent_bytes)
        self._keeper = Keeper(file, routers.collect, metrics) if file else None

    async def begin(self, take_in: Callable[[Snapshot], Awaitable[bool]]) -> None:
        """Find what to begin with. take_in: returns whether it could be taken in."""
        found = await self.link.first() if self.link else None
        kept = await self._keeper.read() if self._keeper else None
        if found and not self._knows_less(found, kept):
            if await take_in(found):
                return
            found = None
        if kept:
            await take_in(kept)
        if found:
            await take_in(found)

    async def first(self) -> Sequence[Snapshot]:
        """What to begin with, in the order in which it is to be taken in."""
        snapshots: list[Snapshot] = []

        async def keep(snapshot: Snapshot) -> bool:
            snapshots.append(snapshot)
            return True

        await self.begin(keep)
        return snapshots

    def _knows_less(self, found: Snapshot, kept: Snapshot | None) -> bool:
        if kept is None or kept.header.format != self._format:
            return False
        return found.header.partial or found.size < MUCH * kept.size

    def begun(self) -> None:
        """What it begins with has been taken in, or there is nothing."""
        if self.link:
            self.link.begun()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.link, self._keeper):
                if part:
                    group.create_task(for_ever(part.run, log, "sharing or keeping what is known failed"))

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
