"""This process's knowledge: its router's, together with which process each replica is. Collected and restored in slices.

Between two slices requests have their turns; while there are any, it pauses there. So a snapshot takes a share of one core for
some seconds at most.

While the first snapshot is not all taken in, a collected one is partial, and worth less than the one that it came from. It
stays so if the process is stopped before.
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

MAX_BYTES = 256 << 20  # of one snapshot: the least recently used prefixes are left out
PAUSE_S = 0.002  # between two slices of a collection
MAX_LATE = 8  # snapshots that are kept for them
LATE_S = 60.0  # replicas that join within that time get what a snapshot has of them
LOOK_S = 0.5


class Knowledge:
    """See the top of this file."""

    def __init__(self, local: LocalControl) -> None:
        self._live = local.live
        self._router = local.router
        self._fleet = local.fleet
        self._metrics = local.metrics.of(SnapshotMetrics)
        self._clock = local.clock
        self._beginning = False  # the first snapshot is being taken in, or was not to the end
        self._begun_with: list[Restorer] = []
        self._late: list[tuple[float, Restorer, Header]] = []  # until when, what is left, and of which replicas
        self._any_late = asyncio.Event()

    async def collect(self, since_s: float = math.inf, most_bytes: int = MAX_BYTES) -> Snapshot | None:
        """A snapshot of the prefixes used in the last since_s seconds, of about most_bytes at most. None: nothing is known."""
        if not self._router.trie.blocks:
            return None
        origins = {state.name: origin_of(state) for state in self._fleet.replicas}
        at = self._clock()
        partial = self._beginning or any(restorer in self._begun_with for _, restorer, _ in self._late)
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

    async def begin(self, snapshot: Snapshot) -> None:
        """Take in a snapshot that this process begins with. Raises KnowledgeError."""
        self._beginning = True
        try:
            restorer = await self._restore(snapshot)
            if restorer.waiting:
                self._begun_with.append(restorer)
        except Exception:  # not CancelledError: the process is stopped
            self._beginning = False
            raise
        self._beginning = False

    async def restore(self, snapshot: Snapshot) -> None:
        """Take in another one. Raises KnowledgeError."""
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
        await self._take(restorer, snapshot.header)
        age_s, blocks = round(self._clock() - snapshot.at, 1), restorer.blocks
        about = {"source": snapshot.source, "age_s": age_s, "blocks": blocks, "records": restorer.records}
        if restorer.waiting and len(self._late) < MAX_LATE:
            self._late.append((self._clock() + LATE_S, restorer, snapshot.header))
            self._any_late.set()
            about["replicas_unknown"] = len(restorer.waiting)
        else:
            await _free(restorer)
        self._metrics.restored_blocks.add((), restorer.blocks)
        log.info("prefix index restored", extra=about)
        return restorer

    async def _take(self, restorer: Restorer, header: Header) -> None:
        def restarted(name: str) -> bool:
            state = self._fleet.named(name)
            return state is None or has_restarted(state, header.origins.get(name))

        begun = self._clock()
        for _ in restorer.steps(restarted):
            took_s = self._clock() - begun
            await asyncio.sleep(took_s if self._router.ledger.open_leases else 0)
            begun = self._clock()

    async def run(self) -> None:
        """Take in the rest of snapshots for replicas that join late, until it is cancelled."""
        while True:
            if not self._late:
                self._any_late.clear()
                await self._any_late.wait()
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # a bug must not end what goes on beside it
                log.exception("a snapshot was not taken in for a replica that joined late")
                self._late.clear()

    async def _look(self) -> None:
        for late in tuple(self._late):
            until, restorer, header = late
            if self._clock() > until or not restorer.waiting:
                self._late.remove(late)
                await _free(restorer)
            elif any(self._router.known(name) is not None for name in restorer.waiting):
                before = restorer.blocks
                await self._take(restorer, header)
                self._metrics.restored_blocks.add((), restorer.blocks - before)

    def __repr__(self) -> str:
        return f"<Knowledge of {self._router!r}>"


async def _free(restorer: Restorer) -> None:
    for _ in restorer.free():
        await asyncio.sleep(0)
