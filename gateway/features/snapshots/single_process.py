"""A gateway of one process, with its prefix index in a file."""

from __future__ import annotations

import asyncio
import logging

from gateway.cluster.commands import LocalControl, SingleProcess
from gateway.features.snapshots.keeper import Keeper, SnapshotFile
from gateway.features.snapshots.knowledge import Knowledge
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot, format_of
from gateway.features.snapshots.warm_start import Siblings, WarmStart

log = logging.getLogger("warmroute.snapshots")


def with_file(local: LocalControl, snapshot: SnapshotFile | None) -> SingleProcess:
    """snapshot: the file to read at the start and to write at the end; None: no file."""
    return SingleProcess(local, knowledge_of(local, Knowledge(local), snapshot))


def knowledge_of(
    local: LocalControl, knowledge: Knowledge, snapshot: SnapshotFile | None, siblings: Siblings | None = None
) -> SingleKnowledge:
    """siblings: gateways that share the prefix index; None: none."""
    keeper = Keeper(snapshot, knowledge.collect, local.metrics.of(SnapshotMetrics)) if snapshot else None
    return SingleKnowledge(knowledge, format_of(local.live.config.routing), keeper, siblings)


class SingleKnowledge(WarmStart):
    """The `IndexPersistence` part of a gateway of one process."""

    def __init__(self, knowledge: Knowledge, format: str, keeper: Keeper | None, siblings: Siblings | None) -> None:  # noqa: A002
        super().__init__(format, keeper, siblings)
        self.knowledge = knowledge

    async def begin(self) -> None:
        await self.apply_all(self._apply)
        self.started()

    async def _apply(self, snapshot: Snapshot) -> bool:
        try:
            await self.knowledge.restore_first(snapshot)
        except KnowledgeError as error:
            about = {"source": snapshot.source, "reason": str(error)}
            log.warning("snapshot ignored", extra=about)
            return False
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.knowledge.run())
            group.create_task(super().run())
