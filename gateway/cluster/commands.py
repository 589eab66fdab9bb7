"""Commands and questions for every process of this gateway, and /metrics merged over all of them.

A gateway is one process (`SingleProcess`), or several workers: callers see a `ControlPlane` in both cases. Each process does
its own part as `LocalControl`. The commands: `messages.py`. Questions and messages of features: `topics.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, assert_never

from gateway.cluster.membership import Membership
from gateway.cluster.messages import Command, Drain, Join, Leave, Perform, Reconfigure, RejectConfig
from gateway.cluster.reload import Parts, Reload
from gateway.cluster.replication import BATCH_S, ReplicationTransport, Replicator, UnknownReplicas
from gateway.cluster.topics import Topics
from gateway.config.live import Live
from gateway.fleet.membership import member_of
from gateway.telemetry.counters import Instruments
from gateway.telemetry.exposition import SingleFlight, render
from gateway.telemetry.metrics import Metrics

COUNT_S: Final = BATCH_S  # between two counts of the slots in use by others


class LocalControl:
    """The control of this process. topics: its features' answers and receivers for other processes."""

    def __init__(
        self,
        *,
        live: Live,
        parts: Parts,
        membership: Membership,
        reload: Reload,
        metrics: Metrics,
        topics: Topics,
        clock: Callable[[], float],
    ) -> None:
        self.beginning = False  # snapshots are still to be loaded: the index's clock must not run before
        self.live = live
        self.membership = membership
        self.reload = reload
        self.router = parts.router
        self.fleet = parts.fleet
        self.metrics = metrics
        self.topics = topics
        self.begin_leaving: Callable[[], None] = lambda: None  # `Running.begin_leaving`
        self.clock = clock
        self.parts = parts
        self.before_page: Callable[[], None] = lambda: None  # sets further gauges
        self._unknown = UnknownReplicas(parts.router, metrics)
        self._counted = self._count_again = False  # slots in use by others: counted within the last COUNT_S; changed since then

    async def execute(self, command: Command) -> None:
        """Execute the command in this process. Raises ConfigError if that is impossible."""
        match command:
            case Drain(name, on):
                self.membership.drain(name, on=on)
            case Join(pool, replica):
                await self.membership.add(member_of(replica, pool))
            case Leave(name):
                await self.membership.remove(name)
            case Reconfigure():
                await self.reload.take(command.config(type(self.live.config)))
            case RejectConfig(why):
                self.reload.refuse(why)
            case Perform(topic, argument):
                await self.topics.execute(topic, argument)
            case _:
                assert_never(command)

    def failing(self, replica: str) -> None:
        """See `Learner`."""
        self.fleet.doubt(replica)

    def unknown(self, replica: str) -> None:
        """See `Learner`."""
        self._unknown.booked(replica, self.clock())

    def followed(self, lost: list[str], age_s: float | None) -> None:
        """See `Learner`."""
        for name in lost:
            self.fleet.zero_hits(name)
        if age_s is not None:
            self.metrics.worker_replication_lag_seconds.observe((), age_s)
        if self._counted:
            self._count_again = True
        else:
            self._count_remote()

    def _count_remote(self) -> None:
        """Count the slots in use by others. O(replicas), so not for every batch, but at once if batches are rare."""
        ledger = self.router.ledger
        for pool in self.fleet.pools:
            loads = [ledger.of(state.name) for state in pool.replicas]
            further = sum([load.remote_further for load in loads])
            pool.admission.set_remote_inflight(sum([load.remote_inflight for load in loads]), further)
        self._counted, self._count_again = True, False
        asyncio.get_running_loop().call_later(COUNT_S, self._may_count)

    def _may_count(self) -> None:
        self._counted = False
        if self._count_again:
            self._count_remote()

    async def probed(self, command: Command) -> None:
        """Wait for the work that an executed command has begun: the first probe of an added replica. Bounded."""
        if isinstance(command, Join):
            await self.membership.probed(command.replica.name)

    async def run(self) -> None:
        """Watch the sources of configurations and of members until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.reload.run())
            group.create_task(self.membership.run())

    def page(self) -> Instruments:
        """The metrics of this process, with current gauges."""
        metrics, memory, connections = self.metrics, self.parts.memory, self.parts.connections
        metrics.set_router_gauges(self.router)
        metrics.set_memory_gauges(held=memory.held, limit=memory.limit, rejected=memory.refused)
        metrics.set_connection_gauges(open_now=connections.open, limit=connections.limit, rejected=connections.refused)
        self.fleet.set_gauges(metrics, self.clock())
        self.before_page()
        return metrics.instruments


class ControlPlane(Protocol):
    async def execute(self, command: Command) -> None:
        """Execute the command in all processes. Returns when all have executed it, and have probed a replica that it adds.

        Commands are executed in the same order everywhere. A reload is a command, and waits for the joining replicas for a
        bounded time. Raises ConfigError if the command is impossible.
        """

    async def page(self) -> bytes:
        """The metrics of all processes together, in Prometheus' text format."""

    async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
        """The answers of all processes, this one included, by process; empty and late answers are omitted."""

    def publish(self, topic: str, message: bytes) -> None:
        """Send a message to all other processes, in the order of this process's messages. Never blocks."""

    @property
    def unsent(self) -> int:
        """Bytes that were published and are still to be sent."""

    async def run(self) -> None:
        """Background work, until it is cancelled."""

    async def ready(self) -> None:
        """Wait until this process can serve its first request."""

    async def stop(self) -> None:
        """Write a snapshot for the next process, after the requests are over."""


class IndexPersistence(Protocol):
    """Stores the prefix index beyond the life of this process: in a file, at other gateways."""

    def __bool__(self) -> bool:
        """True if there may be a stored index."""

    async def begin(self) -> None:
        """Load the index, before the first request."""

    async def run(self) -> None:
        """Background work, from before `begin` until after `close`."""

    async def keep(self) -> None:
        """Write a snapshot for the next start, after the requests are over."""

    async def close(self) -> None:
        """Close, after the last events were published."""


class SingleProcess:
    """The control plane of a gateway that is one process."""

    def __init__(
        self, local: LocalControl, lasting: IndexPersistence | None = None, transport: ReplicationTransport | None = None
    ) -> None:
        """lasting: stores the prefix index; None: it is not stored. transport: to other gateways; None: there are none."""
        self._local = local
        self._pages = SingleFlight(lambda: render(local.page()))
        self._replicator: Replicator | None = None
        self._ready = False
        self.lasting = lasting
        local.beginning = bool(lasting)
        if transport:
            self._replicator = Replicator(
                local.router,
                transport,
                clock=local.clock,
                call_later=asyncio.get_running_loop().call_later,
                published=lambda: None,
                learner=local,
            )

    async def execute(self, command: Command) -> None:
        await self._local.execute(command)
        await self._local.probed(command)

    async def page(self) -> bytes:
        return await self._pages.get()

    async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
        answer = self._local.topics.answer(topic, question)
        return {0: answer} if answer else {}

    def publish(self, topic: str, message: bytes) -> None:
        """There is no other process."""

    @property
    def unsent(self) -> int:
        return 0

    async def run(self) -> None:
        if self.lasting is not None:
            await self.lasting.run()

    async def ready(self) -> None:
        try:
            if self.lasting is not None:
                await self.lasting.begin()
        finally:
            self._local.beginning = False
        if self._replicator:
            self._replicator.start()
        self._ready = True

    async def stop(self) -> None:
        if self._ready and self.lasting is not None:  # before that, the last snapshot is better
            await self.lasting.keep()
        if self._replicator:
            self._replicator.flush()
        if self.lasting is not None:
            await self.lasting.close()
