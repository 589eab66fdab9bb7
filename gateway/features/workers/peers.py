"""A worker's connection to the hub: the control plane over all workers, and the replication of its router.

Commands of operators and questions for counters go through the hub to all workers, and their answers return. Routing events use
the transport (`gateway/cluster/replication.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from gateway.cluster.commands import LocalControl
from gateway.cluster.messages import Command, Join, Reconfigure, Reset, Want
from gateway.cluster.replication import ReplicationTransport, Replicator
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.errors import internal_error, workers_silent
from gateway.features.snapshots.knowledge import Knowledge
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.features.workers.channel import HUB, Channel
from gateway.features.workers.messages import (
    COUNTERS,
    LEAVING,
    MEMBERS,
    SNAPSHOT,
    Ask,
    CatchUpEnd,
    Execute,
    Heartbeat,
    Message,
    Publish,
    SnapshotPart,
    SourceMember,
    SourceMembers,
    TopicAnswer,
    decode_members,
    decode_wanted,
    encode,
)
from gateway.features.workers.questions import PEER_LIMITS, PeerLimits, Questions
from gateway.features.workers.section import WORKERS
from gateway.features.workers.transfer import ReceivedSnapshot, SnapshotReceiver, send
from gateway.features.workers.transport import HubTransport
from gateway.fleet.membership import Member
from gateway.telemetry.counters import MAX_LABEL_SETS, Instruments
from gateway.telemetry.exposition import SingleFlight, SnapshotError, merge, pack, render

log = logging.getLogger("warmroute.workers")

REPORT_S = 0.1, 1.0  # seconds: pause after counters were sent; then the longest wait for a routed request
REPORT_SHARE = 0.01  # share of the time spent on snapshots, within MAX_REPORT_S
# Between snapshots while requests are routed. A killed worker loses later counts, unless a scrape has read them.
MAX_REPORT_S = 0.5
ALIVE_S = 0.5  # between two heartbeats
MEMBERS_PAUSE_S = 0.2


def worker_share(config: Config) -> Config:
    """A worker's share of the gateway's limits. A pool's max_inflight is not divided, because the workers share it at run
    time.
    """

    def part(total: int) -> int:
        return math.ceil(total / WORKERS.of(config))

    pools = tuple(replace(pool, max_queue=part(pool.max_queue)) for pool in config.pools)
    limits = replace(config.limits, connections=part(config.limits.connections))
    return replace(config, pools=pools, limits=limits)


class Peers:
    """The `ControlPlane` of a worker. To be created in the event loop."""

    def __init__(
        self, local: LocalControl, channel: Channel, transport: ReplicationTransport, limits: PeerLimits = PEER_LIMITS
    ) -> None:
        """The reader of the channel is to call `receive` with each message."""
        loop = asyncio.get_running_loop()
        self._local = local
        self._channel = channel
        self._limits = limits
        self._busy = asyncio.Event()  # set: a request was booked since the counters were sent
        self._current = asyncio.Event()
        self._commands: asyncio.Queue[tuple[int, Execute | CatchUpEnd | SourceMembers | ReceivedSnapshot]] = asyncio.Queue()
        self._arrival = SnapshotReceiver()
        self._collecting: asyncio.Future[None] | None = None  # a snapshot for the hub
        self._arrived: asyncio.Queue[ReceivedSnapshot] = asyncio.Queue()
        self._scrapes: set[tuple[int, int]] = set()  # (asker, its number) of questions for this worker's counters
        self._scraped = asyncio.Event()  # set: a question for counters waits
        self._snapshots = asyncio.Lock()  # one at a time, so that the last one sent is the latest
        self._pages = SingleFlight(self._page)
        self._call_later = loop.call_later
        self._found: dict[str, Sequence[Member]] = {}  # members to be sent, by source
        self._questions = Questions(channel, limits)
        self.knowledge = Knowledge(local)
        local.membership.published = self._publish_members
        local.topics.receives(LEAVING, lambda _hub, _message: local.begin_leaving())
        self.replicator = Replicator(
            local.router,
            transport,
            clock=local.clock,
            call_later=loop.call_later,
            published=self._busy.set,
            learner=local,
            unsent_bytes=limits.unsent_bytes,
        )

    def receive(self, worker: int, message: Message) -> None:
        """Handles a message from the hub, except for replication."""
        match message:
            case Want():
                self._local.topics.joined()
            case Reset(ended=True):
                self._questions.leave(worker)
                self._local.topics.ended(worker)
            case SnapshotPart():
                if arrived := self._arrival.receive(message):
                    if self._current.is_set():
                        self._arrived.put_nowait(arrived)
                    else:
                        self._commands.put_nowait((worker, arrived))
            case Ask(topic=topic) if topic == SNAPSHOT:
                if self._collecting is not None:
                    self._collecting.cancel()  # a later question cancels it
                self._collecting = asyncio.ensure_future(self._collect(message))
            case Execute() | CatchUpEnd():
                self._commands.put_nowait((worker, message))
            case TopicAnswer():
                self._questions.receive(worker, message)
            case _:
                self._receive_topic(worker, message)

    def _receive_topic(self, worker: int, message: Message) -> None:
        match message:
            case Ask(number, topic) if topic == COUNTERS:
                self._scrapes.add((worker, number))
                self._scraped.set()
            case Ask(number, topic, question):
                self._channel.send(TopicAnswer(number, self._local.topics.answer(topic, question), topic), worker)
            case Publish(topic, content) if topic == MEMBERS:
                self._commands.put_nowait((worker, decode_members(content)))
            case Publish(topic, content):
                self._local.topics.receive(topic, worker, content)

    def _publish_members(self, source: str, members: Sequence[Member]) -> None:
        """Publishes the members of a source for workers that start later; in a series of changes, only the last one of each
        MEMBERS_PAUSE_S.
        """
        if source not in self._found:
            self._call_later(MEMBERS_PAUSE_S, lambda: self._send_members(source))
        self._found[source] = members

    def _send_members(self, source: str) -> None:
        members = self._found.pop(source, None)
        if members is not None:
            found = [SourceMember(*(getattr(each, name) for name in SourceMember.__struct_fields__)) for each in members]
            self._channel.send(Publish(MEMBERS, encode(SourceMembers(source, tuple(found)))))

    # -- the control plane

    async def execute(self, command: Command) -> None:
        """Also raises GatewayError 503 if the hub did not forward the command, or not all workers have answered."""
        until = self._local.clock() + self._limits.forwarded_s
        question = await self._questions.ask(lambda number: Execute(number, command, until), self._limits.command_s)
        for answer in question.answers.values():
            if answer.internal:
                raise internal_error()
            if answer.error is not None:
                raise ConfigError(answer.error)
        if question.silent:
            raise workers_silent(question.silent)

    async def page(self) -> bytes:
        """Also raises GatewayError 503 if the hub did not forward the question."""
        return await self._pages.get()

    async def _page(self) -> bytes:
        question = await self._questions.ask(lambda number: Ask(number, COUNTERS), self._limits.scrape_s)
        pages = question.all()
        total = self._local.metrics.fresh().instruments
        total.limit_label_sets(MAX_LABEL_SETS * (len(pages) + 1))  # each worker limits its own label sets
        for worker, page in pages.items():
            # A worker that has ended in the meantime is in no other page.
            await self._merge(total, worker, page, ended=worker in question.ended)
        self._local.fleet.hide_departed(total)
        return await render(total)

    async def _merge(self, total: Instruments, worker: int, page: bytes, *, ended: bool) -> None:
        try:
            await merge(total, page, ended=ended)
        except SnapshotError as error:
            log.error("a worker's counters are left out", extra={"worker": worker, "error": str(error)})

    async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
        """Also raises GatewayError 503 if the hub did not forward the question. The hub may answer for all (`Hub.topics`)."""
        asked = await self._questions.ask(lambda number: Ask(number, topic, question), self._limits.scrape_s)
        return asked.all()

    def publish(self, topic: str, message: bytes) -> None:
        self._channel.send(Publish(topic, message))

    @property
    def unsent(self) -> int:
        return self._channel.unsent

    async def ready(self) -> None:
        await self._current.wait()
        for source in tuple(self._found):  # so that the hub has them before the first request
            self._send_members(source)

    async def stop(self) -> None:
        """Nothing to do: the supervisor has collected a snapshot before it stops the workers."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_heartbeats())
            group.create_task(self._send_counters())
            group.create_task(self._execute_commands())
            group.create_task(self._answer_scrapes())
            group.create_task(self._restore_arrived())
            group.create_task(self.knowledge.run())

    # -- background work

    async def _send_heartbeats(self) -> None:
        """Without heartbeats the supervisor passes this worker's connections to others (`handover.py`)."""
        while True:
            if not self._channel.unsent:
                self._channel.send(Heartbeat())
            await asyncio.sleep(ALIVE_S)

    async def _send_counters(self) -> None:
        busy_s, idle_s = REPORT_S
        while True:
            begun = self._local.clock()
            if not self._channel.unsent:
                self._busy.clear()
                async with self._snapshots:
                    self._channel.send(Publish(COUNTERS, await pack(self._local.page())))
            took_s = self._local.clock() - begun  # including the requests handled in between
            await asyncio.sleep(max(busy_s, min(MAX_REPORT_S, took_s / REPORT_SHARE) - took_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._busy.wait()

    async def _answer_scrapes(self) -> None:
        """Answers questions for this worker's counters, with one snapshot for all waiting ones."""
        while True:
            await self._scraped.wait()
            self._scraped.clear()
            scrapes, self._scrapes = self._scrapes, set()
            async with self._snapshots:
                page = await pack(self._local.page())
                for asker, number in scrapes:
                    self._channel.send(TopicAnswer(number, page, COUNTERS), asker)

    async def _execute_commands(self) -> None:
        """Executes commands in the order that is the same for all workers."""
        self._local.beginning = True
        try:
            await self._replay()
        finally:
            self._local.beginning = False
        self.replicator.start()
        self._current.set()
        async with asyncio.TaskGroup() as answers:
            while True:
                asker, message = await self._commands.get()
                if isinstance(message, Execute):
                    answer = await self._executed(message)
                    if answer.error is None and isinstance(message.command, Join):
                        answers.create_task(self._answer_when_probed(asker, message, answer))
                    else:
                        self._channel.send(answer, asker)
                elif isinstance(message, ReceivedSnapshot):
                    await self._restore(message, self.knowledge.restore)

    async def _restore_arrived(self) -> None:
        """Restores snapshots of other gateways, which the hub sends one by one. Commands do not wait for them."""
        while True:
            await self._restore(await self._arrived.get(), self.knowledge.restore)

    async def _restore(self, arrived: ReceivedSnapshot, restore: Callable[[Snapshot], Awaitable[None]]) -> None:
        try:
            await restore(arrived.snapshot)
        except KnowledgeError as error:
            log.warning("snapshot ignored", extra={"reason": str(error)})
        except Exception:  # a bug must not end the worker
            log.exception("a snapshot was not restored")
        self._channel.send(TopicAnswer(arrived.number, topic=SNAPSHOT))

    async def _collect(self, question: Ask) -> None:
        """Collects a snapshot for the hub, which asks for one at a time."""
        try:
            snapshot = await self.knowledge.collect(*decode_wanted(question.question))
        except Exception as error:  # the hub must get an answer
            log.exception("a snapshot could not be collected")
            reason = f"a worker could not collect it: {type(error).__name__}"
            self._channel.send(TopicAnswer(question.number, topic=SNAPSHOT, error=reason))
            return
        if snapshot is None:
            self._channel.send(TopicAnswer(question.number, topic=SNAPSHOT))
        else:
            await send(self._channel, question.number, snapshot)

    async def _answer_when_probed(self, asker: int, message: Execute, answer: TopicAnswer) -> None:
        await self._local.probed(message.command)
        self._channel.send(answer, asker)

    async def _executed(self, message: Execute) -> TopicAnswer:
        command = message.command
        try:
            if isinstance(command, Reconfigure):
                command = Reconfigure.to(worker_share(command.config(type(self._local.live.config))))
            await self._local.execute(command)
        except ConfigError as error:
            return TopicAnswer(message.number, error=str(error))
        except Exception:  # a bug in one command must not stop the execution of others
            log.exception("command failed")
            return TopicAnswer(message.number, internal=True)
        return TopicAnswer(message.number)

    async def _replay(self) -> None:
        """Executes the commands from before this worker started, up to CatchUpEnd; then the first probes, in parallel.

        The pending ones have an asker, who gets this worker's answer, too.
        """
        before: list[Command] = []
        while True:
            asker, message = await self._commands.get()
            if isinstance(message, CatchUpEnd):
                break
            if isinstance(message, ReceivedSnapshot):
                await self._restore(message, self.knowledge.restore_first)
                continue
            if isinstance(message, SourceMembers):
                self._local.membership.seed(message.source, [_member(each) for each in message.members])
                continue
            before.append(message.command)
            answer = await self._executed(message)
            if answer.error is not None:  # the other workers refuse it as well
                log.warning("an earlier command is refused", extra={"error": answer.error})
            if asker != HUB:
                self._channel.send(answer, asker)
            await asyncio.sleep(0)  # there may be many commands: lets heartbeats be sent
        await asyncio.gather(*map(self._local.probed, before))

    def __repr__(self) -> str:
        return f"<Peers, {self.replicator!r}>"


def _member(found: SourceMember) -> Member:
    return Member(*(getattr(found, name) for name in SourceMember.__struct_fields__))


def connect(local: LocalControl, channel: Channel, orphaned: Callable[[], None], limits: PeerLimits = PEER_LIMITS) -> Peers:
    """The control plane of a worker on the hub's channel. orphaned: called when the supervisor has ended."""
    transport = HubTransport(channel)
    peers = Peers(local, channel, transport, limits)

    def receive(worker: int, message: Message, _payload: bytes) -> None:
        transport.receive(worker, message)
        peers.receive(worker, message)

    channel.receive(receive, orphaned)
    return peers
