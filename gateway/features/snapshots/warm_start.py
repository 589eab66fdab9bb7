"""Snapshots that the routers of a gateway begin with, and the file that the next start reads.

There may be a file, other gateways (siblings), both or none. At the start a snapshot of a sibling goes before the file, which
is older. Where it is much smaller the sibling knows little itself (it began alone, a while ago) or has only a part yet: then
the file is taken in, and the sibling's snapshot after it. Not always, for what is older than the newest of the file would then
seem as new as that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from gateway.features.snapshots.keeper import Keeper
from gateway.features.snapshots.snapshot import Snapshot
from gateway.tasks import for_ever

log = logging.getLogger("warmroute.snapshots")

MUCH: Final = 0.8  # of the file: a sibling that knows less than that does not go before it


class Siblings(Protocol):
    """Other gateways, and the exchange with them."""

    async def first(self) -> Snapshot | None:
        """A snapshot of one of them; None: there is no other gateway, or none answers in time."""

    def begun(self) -> None:
        """The first snapshot has been taken in, or there is none."""

    async def run(self) -> None:
        """Until it is cancelled."""

    async def close(self) -> None:
        """The last events were published."""


class WarmStart:
    """See the top of this file. `run` is to be a task, from before `find` until after `close`."""

    def __init__(self, format: str, keeper: Keeper | None, siblings: Siblings | None) -> None:  # noqa: A002
        """format: of block keys, `format_of` the configuration."""
        self._format = format
        self._keeper = keeper
        self._siblings = siblings

    def __bool__(self) -> bool:
        """True: there may be a snapshot."""
        return bool(self._keeper or self._siblings)

    async def find(self, take_in: Callable[[Snapshot], Awaitable[bool]]) -> None:
        """Find the snapshots. take_in: returns whether the snapshot could be taken in."""
        found = await self._siblings.first() if self._siblings else None
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
        """The snapshots, in the order in which they are to be taken in."""
        snapshots: list[Snapshot] = []

        async def keep(snapshot: Snapshot) -> bool:
            snapshots.append(snapshot)
            return True

        await self.find(keep)
        return snapshots

    def _knows_less(self, found: Snapshot, kept: Snapshot | None) -> bool:
        if kept is None or kept.header.format != self._format:
            return False
        return found.header.partial or found.size < MUCH * kept.size

    def begun(self) -> None:
        """The snapshots have been taken in, or there are none."""
        if self._siblings:
            self._siblings.begun()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self._siblings, self._keeper):
                if part:
                    group.create_task(for_ever(part.run, log, "sharing or keeping the prefix index failed"))

    async def keep(self) -> None:
        """The requests are over: write the file that the next start reads."""
        if self._keeper:
            await self._keeper.write_last()

    async def close(self) -> None:
        """The last events were published."""
        if self._siblings:
            await self._siblings.close()

    def __repr__(self) -> str:
        return f"<WarmStart: {self._siblings!r}, {self._keeper!r}>"
