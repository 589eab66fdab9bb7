"""The followed publishers: of the replicas that are up, looked up when a replica comes up.

A publisher that two replicas name is followed for neither: its events cannot be attributed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import Final

from gateway.core import Core
from gateway.features.kv_events.metrics import KvEventMetrics
from gateway.features.kv_events.receiver import EventReceiver
from gateway.features.kv_events.residency import EngineResidency
from gateway.features.kv_events.section import KV_EVENTS
from gateway.features.kv_events.sources import FAILURES, sources_of
from gateway.features.kv_events.stream import EventStream, Source
from gateway.features.kv_events.wire import TIERS
from gateway.fleet.state import ReplicaState

log = logging.getLogger("warmroute.kv_events")

AT_ONCE: Final = 8  # replicas that are asked
AGAIN_S: Final = 60.0  # until a replica without publishers is asked again
FAULTS: Final = ("gap", "restart", "refused", "orphan", "conflict")


class AskedReplica:
    """A replica, asked for its publishers. up_since: of the process that has answered; None: none has. purged_at: its last loss
    of its cache.
    """

    __slots__ = ("asked_at", "purged_at", "sources", "task", "up_since")

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.task: asyncio.Task[list[Source]] | None = None
        self.up_since: float | None = None
        self.asked_at = self.purged_at = float("-inf")


class PublisherSet:
    """Follows publishers (see the module), and gives their news to the router and the metrics."""

    def __init__(self, core: Core) -> None:
        self._core, self._fleet, self._metrics = core, core.fleet, core.metrics.of(KvEventMetrics)
        self._asked: dict[ReplicaState, AskedReplica] = {}
        self._followed: set[Source] = set()
        self._shared: set[Source] = set()
        self._counted: dict[Source, tuple[int, ...]] = {}
        self._receiver: EventReceiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.residency = EngineResidency(self._pool_of, core.clock)

    async def start(self) -> None:
        """Begin to receive."""
        self._loop = asyncio.get_running_loop()
        self._receiver = EventReceiver(self._lost, KV_EVENTS.of(self._core.config).memory_mb << 20, self._core.clock)

    async def close(self) -> None:
        """End all questions, and the thread."""
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            await asyncio.to_thread(receiver.close)

    # -- every second

    def sweep(self, now: float) -> None:
        """Ask replicas that have come up, and forget departed ones. O(replicas)."""
        if self._receiver is None:
            return
        present = set(self._fleet.replicas)
        for state in [each for each in self._asked if each not in present]:
            if (task := self._asked.pop(state).task) is not None:
                task.cancel()
        running = sum(asked.task is not None for asked in self._asked.values())
        for state in present:
            asked = self._asked.get(state)
            if asked is None:
                asked = self._asked[state] = AskedReplica()
            if not state.up or asked.task is not None:
                continue
            unfound = not asked.sources and now - asked.asked_at > AGAIN_S
            if (state.up_since != asked.up_since or unfound) and running < AT_ONCE:
                running += 1
                asked.asked_at = now
                asked.task = asyncio.get_running_loop().create_task(sources_of(self._core.upstream, state))
                asked.task.add_done_callback(partial(self._found, state, asked, state.up_since))
            elif asked.sources and (purged := self._core.router.purged_at(state.name)) > asked.purged_at:
                asked.purged_at = purged
                for source in asked.sources:
                    self._receiver.resynchronise(source)
        self._follow()
        self.residency.renew(self._receiver.streams)

    def _found(self, state: ReplicaState, asked: AskedReplica, up_since: float, task: asyncio.Task[list[Source]]) -> None:
        """A replica has answered."""
        asked.task = None
        if task.cancelled() or self._receiver is None:
            return
        if isinstance(error := task.exception(), FAILURES):
            return  # asked again: its up_since is not noted
        if error is not None:
            log.error("event publishers of a replica", exc_info=error, extra={"replica": state.name})
            return
        if not task.result() and asked.up_since != up_since:
            log.info("replica names no event publisher that can be followed", extra={"replica": state.name})
        before, asked.sources, asked.up_since = asked.sources, task.result(), up_since
        asked.purged_at = self._core.router.purged_at(state.name)
        for source in set(before) & set(asked.sources):
            self._receiver.resynchronise(source)  # it came up again
        self._follow()

    def _follow(self) -> None:
        """Follow the publishers that are named once."""
        if self._receiver is None:
            return
        named = [source for asked in self._asked.values() for source in asked.sources]
        times = Counter((source.endpoint, source.topic) for source in named)
        wanted = {source for source in named if times[source.endpoint, source.topic] == 1}
        shared = set(named) - wanted
        for source in shared - self._shared:
            text = "several replicas name one event publisher: it is not followed"
            log.warning(text, extra={"replica": source.replica, "endpoint": source.endpoint})
        self._shared = shared
        for source in self._followed - wanted:
            self._receiver.leave(source)
            self._counted.pop(source, None)
        for source in wanted - self._followed:
            log.info("events of a replica are followed", extra={"replica": source.replica, "endpoint": source.endpoint})
            self._receiver.follow(source)
        self._followed = wanted

    def _pool_of(self, name: str) -> str:
        state = self._fleet.named(name)
        return state.member.pool if state is not None else ""

    # -- news of the thread

    def _lost(self, source: Source) -> None:
        """In the thread: an engine has lost its cache."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lost_cache, source)

    def _lost_cache(self, source: Source) -> None:
        state = self._fleet.named(source.replica)
        asked = self._asked.get(state) if state is not None else None
        if asked is None or len(asked.sources) != 1:
            return  # the other ranks still hold theirs
        self._core.router.restarted(source.replica)
        asked.purged_at = self._core.router.purged_at(source.replica)

    # -- for operators

    def set_gauges(self) -> None:
        """Bring the metrics up to date."""
        self._metrics.followed.values.clear()
        self._metrics.blocks.values.clear()
        for name, streams in self.residency.replicas.items():
            self._metrics.followed.set((name,), self._level(name, streams))
            for tier, label in enumerate(TIERS):
                self._metrics.blocks.set((name, label), sum(stream.holdings.blocks_in(tier) for stream in streams))
            for stream in streams:
                if stream.source in self._followed:  # else its thread still follows it: it was counted
                    self._count(stream)

    def _level(self, name: str, streams: list[EventStream]) -> int:
        if self.residency.is_doubted(name) or not any(stream.tells for stream in streams):
            return 0
        return 2 if all(stream.holdings.complete for stream in streams) else 1

    def _count(self, stream: EventStream) -> None:
        name, ordering, holdings = stream.source.replica, stream.ordering, stream.holdings
        faults = (ordering.gaps, ordering.restarts, stream.refused, holdings.orphans, holdings.conflicts)
        counts = (stream.blocks, *faults)
        before = self._counted.get(stream.source, (0,) * len(counts))
        self._counted[stream.source] = counts
        more = [max(0, now - then) for now, then in zip(counts, before, strict=True)]
        self._metrics.seen.add((name,), more[0])
        for fault, count in zip(FAULTS, more[1:], strict=True):
            self._metrics.faults.add((name, fault), count)

    def rows(self) -> list[dict[str, object]]:
        """The followed publishers, for operators."""
        return [
            {
                "replica": source.replica,
                "rank": source.rank,
                "endpoint": source.endpoint,
                "replay": source.replay or None,
                "state": "doubted" if self.residency.is_doubted(source.replica) else stream.state,
                "complete": stream.holdings.complete,
                "number": stream.ordering.number,
                "block_tokens": stream.holdings.block_tokens,
                "blocks": {label: stream.holdings.blocks_in(tier) for tier, label in enumerate(TIERS)},
                "messages": stream.messages,
                "gaps": stream.ordering.gaps,
                "restarts": stream.ordering.restarts,
                "replays": stream.ordering.replays,
                "dropped_events": stream.dropped,
                "refused": stream.refused,
            }
            for streams in self.residency.replicas.values()
            for stream in streams
            for source in [stream.source]
        ]

    def __repr__(self) -> str:
        return f"<PublisherSet {len(self._followed)} publishers>"
