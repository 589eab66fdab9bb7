"""The snapshots with which the routers of a gateway start, and the file for the next start.

There may be a file, other gateways (siblings), both or none. A sibling's snapshot takes precedence over the file, which is
older. If it is much smaller, the sibling has little knowledge itself (it started alone, a while ago), or only a part. Then the
file is applied first, and the sibling's snapshot after it. This is an exception, because the file's oldest prefixes would then
seem as recent as its latest ones.
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

MIN_SIBLING_SHARE: Final = 0.8  # of the file's size: a smaller snapshot of a sibling does not replace the file


class Siblings(Protocol):
    """Other gateways, and the exchange with them."""

    async def first_snapshot(self) -> Snapshot | None:
        """A snapshot of a sibling. None: there is no other gateway, or none answers in time."""

    def started(self) -> None:
        """The first snapshot has been applied, or there is none."""

    async def run(self) -> None:
        """Runs until cancelled."""

    async def close(self) -> None:
        """Disconnects after the last events were published."""


class WarmStart:
    """The snapshots of a gateway's start. `run` is to be a task, from before `apply_all` until after `close`."""

    def __init__(self, format: str, keeper: Keeper | None, siblings: Siblings | None) -> None:  # noqa: A002
        """format: of block keys, by `format_of`."""
        self._format = format
        self._keeper = keeper
        self._siblings = siblings

    def __bool__(self) -> bool:
        """True if there may be a snapshot."""
        return bool(self._keeper or self._siblings)

    async def apply_all(self, apply: Callable[[Snapshot], Awaitable[bool]]) -> None:
        """Applies the snapshots. apply: returns False if the snapshot could not be applied."""
        found = await self._siblings.first_snapshot() if self._siblings else None
        stored = await self._keeper.read() if self._keeper else None
        if found and not self._lacks_much(found, stored):
            if await apply(found):
                return
            found = None
        if stored:
            await apply(stored)
        if found:
            await apply(found)

    async def snapshots(self) -> Sequence[Snapshot]:
        """The snapshots, in the order in which they are to be applied."""
        snapshots: list[Snapshot] = []

        async def collect(snapshot: Snapshot) -> bool:
            snapshots.append(snapshot)
            return True

        await self.apply_all(collect)
        return snapshots

    def _lacks_much(self, found: Snapshot, stored: Snapshot | None) -> bool:
        """True if the sibling's snapshot is partial, or much smaller than the file's (see the module)."""
        if stored is None or stored.header.format != self._format:
            return False
        return found.header.partial or found.size < MIN_SIBLING_SHARE * stored.size

    def started(self) -> None:
        """The snapshots have been applied, or there are none."""
        if self._siblings:
            self._siblings.started()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self._siblings, self._keeper):
                if part:
                    group.create_task(for_ever(part.run, log, "sharing or saving the prefix index failed"))

    async def keep(self) -> None:
        """Writes the file for the next start, after the last request."""
        if self._keeper:
            await self._keeper.write_last()

    async def close(self) -> None:
        """Disconnects after the last events were published."""
        if self._siblings:
            await self._siblings.close()

    def __repr__(self) -> str:
        return f"<WarmStart: {self._siblings!r}, {self._keeper!r}>"
