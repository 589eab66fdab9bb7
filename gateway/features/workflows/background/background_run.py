"""One background run in this process."""

from __future__ import annotations

import asyncio

from gateway.admission.memory import MemoryLease
from gateway.features.runs.event_log import EventLog, Logs
from gateway.features.workflows.background.journal import StoredRunJournal
from gateway.features.workflows.background.stored_run import RunKey
from gateway.features.workflows.running.event_stream import event_bytes
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.run import WorkflowRun


class BackgroundRun:
    """client: of its place. released: another gateway goes on with it, or it was deleted.
    task: runs it.
    """

    run: WorkflowRun
    journal: StoredRunJournal
    task: asyncio.Task[None]

    def __init__(self, key: RunKey, client: str, lease: MemoryLease, logs: Logs, first: int = 0) -> None:
        """lease: of its values. first: number of its first event."""
        self.key = key
        self.client = client
        self.lease = lease
        self.released = False
        self.first = first
        self.log: EventLog = logs.open(key, lease.account.lease())
        self.log.first = first
        self._logs = logs

    def emit(self, number: int, event: RunEvent) -> None:
        if not self.released:
            self._logs.add(self.log, event_bytes(self.key[1], number, event))

    def release(self) -> None:
        """Ends it here, without an end. Idempotent."""
        if not self.released and not self.journal.ending:
            self.released = True
            self.task.cancel()

    def __repr__(self) -> str:
        return f"<BackgroundRun {self.key[1]}{', released' if self.released else ''}, {self.log!r}>"
