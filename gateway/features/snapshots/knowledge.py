"""The knowledge of this process: its router's prefix index, and the identity of each replica. Collected and restored in slices.

Requests run between two slices, with a pause while there are any. So a snapshot takes only a share of one core for some
seconds.

While the first snapshot is not completely restored, a collected one is partial, and worth less than the first one. It stays
partial if the process is stopped before.
"""

from __future__ import annotations

import asyncio
import logging
import math

from gateway.cluster.commands import LocalControl
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.origins import has_restarted, origin_of
from gateway.features.snapshots.snapshot import (
    Header,
    KnowledgeError,
    Snapshot,
    difference_of,
    format_of,
)
from router.snapshot.collect import collect
from router.snapshot.records import RecordError, decode, encode
from router.snapshot.restore import Restorer

log = logging.getLogger("warmroute.snapshots")

MAX_BYTES = 256 << 20  # per snapshot; the least recently used prefixes are left out
PAUSE_S = 0.002  # between two slices of a collection
MAX_WAITING_SNAPSHOTS = 8  # snapshots that wait for replicas
WAIT_FOR_REPLICAS_S = 60.0  # replicas that join within this time are restored from the snapshot
LOOK_S = 0.5


class Knowledge:
    """The prefix index of this process as a snapshot."""

    def __init__(self, local: LocalControl) -> None:
        self._live = local.live
        self._router = local.router
        self._fleet = local.fleet
        self._metrics = local.metrics.of(SnapshotMetrics)
        self._clock = local.clock
        self._beginning = False  # the first snapshot is being restored, or was not completed
        self._first: list[Restorer] = []
        self._waiting: list[tuple[float, Restorer, Header]] = []  # deadline, rest of the snapshot, its header
        self._any_waiting = asyncio.Event()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """A snapshot of the prefixes used in the last since_s seconds, of about most_bytes at most. None: no prefixes are
        known.
        """
        if not self._router.trie.blocks:
            return None
        origins = {state.name: origin_of(state) for state in self._fleet.replicas}
        at = self._clock()
        partial = self._beginning or any(restorer in self._first for _, restorer, _ in self._waiting)
        header = Header(format_of(self._live.config.routing), origins, partial)
        chunks: list[bytes] = []
        size = 0
        for records in collect(self._router, at, since_s):
            if records:
                chunks.append(encode(records))
                size += len(chunks[-1])
            if size >= most_bytes:
                break
            await asyncio.sleep(PAUSE_S if self._router.ledger.open_leases else 0)
        return Snapshot(header, chunks, at)

    async def restore_first(self, snapshot: Snapshot) -> None:
        """Restores the snapshot with which this process starts. Raises KnowledgeError."""
        self._beginning = True
        try:
            restorer = await self._restore(snapshot)
            if restorer.waiting:
                self._first.append(restorer)
        except Exception:  # not CancelledError: the process is stopped
            self._beginning = False
            raise
        self._beginning = False

    async def restore(self, snapshot: Snapshot) -> None:
        """Restores another snapshot. Raises KnowledgeError."""
        await self._restore(snapshot)

    async def _restore(self, snapshot: Snapshot) -> Restorer:
        ours = format_of(self._live.config.routing)
        if snapshot.header.format != ours:
            raise KnowledgeError(difference_of(snapshot.header.format, ours))
        restorer = Restorer(self._router, snapshot.at, self._clock())
        try:
            for chunk in snapshot.chunks:
                restorer.add(decode(chunk))
                await asyncio.sleep(0)
        except RecordError as error:
            raise KnowledgeError(str(error)) from error
        await self._apply(restorer, snapshot.header)
        age_s, blocks = round(self._clock() - snapshot.at, 1), restorer.blocks
        about = {"source": snapshot.source, "age_s": age_s, "blocks": blocks, "records": restorer.records}
        if restorer.waiting and len(self._waiting) < MAX_WAITING_SNAPSHOTS:
            self._waiting.append((self._clock() + WAIT_FOR_REPLICAS_S, restorer, snapshot.header))
            self._any_waiting.set()
            about["replicas_unknown"] = len(restorer.waiting)
        else:
            await _free(restorer)
        self._metrics.restored_blocks.add((), restorer.blocks)
        log.info("prefix index restored", extra=about)
        return restorer

    async def _apply(self, restorer: Restorer, header: Header) -> None:
        def restarted(name: str) -> bool:
            state = self._fleet.named(name)
            return state is None or has_restarted(state, header.origins.get(name), restorer.at)

        begun = self._clock()
        for _ in restorer.steps(restarted):
            took_s = self._clock() - begun
            await asyncio.sleep(took_s if self._router.ledger.open_leases else 0)
            begun = self._clock()

    async def run(self) -> None:
        """Restores the rest of snapshots for replicas that join late, until cancelled."""
        while True:
            if not self._waiting:
                self._any_waiting.clear()
                await self._any_waiting.wait()
            await asyncio.sleep(LOOK_S)
            try:
                await self._apply_waiting()
            except Exception:  # a bug must not stop concurrent tasks
                log.exception("a snapshot was not restored for a replica that joined late")
                self._waiting.clear()

    async def _apply_waiting(self) -> None:
        for late in tuple(self._waiting):
            until, restorer, header = late
            if self._clock() > until or not restorer.waiting:
                self._waiting.remove(late)
                await _free(restorer)
            elif any(self._router.known(name) is not None for name in restorer.waiting):
                before = restorer.blocks
                await self._apply(restorer, header)
                self._metrics.restored_blocks.add((), restorer.blocks - before)

    def __repr__(self) -> str:
        return f"<Knowledge of {self._router!r}>"


async def _free(restorer: Restorer) -> None:
    for _ in restorer.free():
        await asyncio.sleep(0)
