"""A worker's side of the hub: the control plane over all workers, and the connection of its router to the others'.

Commands of operators and questions for counters go through the hub to all workers, and their answers come back. Routing events
go over the transport (`gateway/cluster/replication.py`).
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
    Current,
    Execute,
    FoundMember,
    FoundMembers,
    Heartbeat,
    Message,
    Part,
    Publish,
    TopicAnswer,
    decode_found,
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

REPORT_S = 0.1, 1.0  # the pause after counters were sent; then up to this long again while no request is routed
REPORT_SHARE = 0.01  # of the time, as far as REPORT_MOST_S allows
# Between snapshots while requests are routed: what is newer, and in no scrape, is lost with a worker that is killed.
REPORT_MOST_S = 0.5
ALIVE_S = 0.5  # between two heartbeats
FOUND_S = 0.2


def part_of(config: Config) -> Config:
    """A worker's share of the gateway's bounds; a pool's max_inflight is not divided: the workers share it at run time."""

    def part(whole: int) -> int:
        return math.ceil(whole / WORKERS.of(config))

    pools = tuple(replace(pool, max_queue=part(pool.max_queue)) for pool in config.pools)
    limits = replace(config.limits, connections=part(config.limits.connections))
    return replace(config, pools=pools, limits=limits)


class Peers:
    """See the top of this file; the `ControlPlane` of a worker. Made within the event loop."""

    def __init__(
        self, local: LocalControl, channel: Channel, transport: ReplicationTransport, limits: PeerLimits = PEER_LIMITS
    ) -> None:
        """The reader of the channel calls `receive` with each message."""
        loop = asyncio.get_running_loop()
        self._local = local
        self._channel = channel
        self._limits = limits
        self._busy = asyncio.Event()  # something was booked since the counters were sent
        self._current = asyncio.Event()
        self._commands: asyncio.Queue[tuple[int, Execute | Current | FoundMembers | ReceivedSnapshot]] = asyncio.Queue()
        self._arrival = SnapshotReceiver()
        self._collecting: asyncio.Future[None] | None = None  # a snapshot for the hub
        self._arrived: asyncio.Queue[ReceivedSnapshot] = asyncio.Queue()
        self._scrapes: set[tuple[int, int]] = set()  # (asker, its number) of questions for this worker's counters
        self._scraped = asyncio.Event()  # there are some
        self._snapshots = asyncio.Lock()  # one at a time: the last that is sent is the newest
        self._pages = SingleFlight(self._page)
        self._call_later = loop.call_later
        self._found: dict[str, Sequence[Member]] = {}  # to be sent
        self._questions = Questions(channel, limits)
        self.knowledge = Knowledge(local)
        local.membership.published = self._publish_found
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
        """A message from the hub; those about replication are ignored here."""
        match message:
            case Want():
                self._local.topics.joined()
            case Reset(ended=True):
                self._questions.leave(worker)
                self._local.topics.ended(worker)
            case Part():
                if arrived := self._arrival.receive(message):
                    if self._current.is_set():
                        self._arrived.put_nowait(arrived)
                    else:
                        self._commands.put_nowait((worker, arrived))
            case Ask(topic=topic) if topic == SNAPSHOT:
                if self._collecting is not None:
                    self._collecting.cancel()  # its question is over
                self._collecting = asyncio.ensure_future(self._collect(message))
            case Execute() | Current():
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
                self._commands.put_nowait((worker, decode_found(content)))
            case Publish(topic, content):
                self._local.topics.receive(topic, worker, content)

    def _publish_found(self, source: str, members: Sequence[Member]) -> None:
        """For workers that are started later. In a storm of changes, only the last one of each FOUND_S."""
        if source not in self._found:
            self._call_later(FOUND_S, lambda: self._send_found(source))
        self._found[source] = members

    def _send_found(self, source: str) -> None:
        members = self._found.pop(source, None)
        if members is not None:
            found = [FoundMember(*(getattr(each, name) for name in FoundMember.__struct_fields__)) for each in members]
            self._channel.send(Publish(MEMBERS, encode(FoundMembers(source, tuple(found)))))

    # -- the control plane

    async def execute(self, command: Command) -> None:
        """Also raises GatewayError 503: the hub did not forward it, or not all workers have answered."""
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
        """Also raises GatewayError 503: the hub did not forward the question."""
        return await self._pages.get()

    async def _page(self) -> bytes:
        question = await self._questions.ask(lambda number: Ask(number, COUNTERS), self._limits.scrape_s)
        pages = question.all()
        whole = self._local.metrics.fresh().instruments
        whole.limit_label_sets(MAX_LABEL_SETS * (len(pages) + 1))  # each worker has bounded its own label sets
        for worker, page in pages.items():
            # A worker that has ended meanwhile is in no other page.
            await self._merge(whole, worker, page, ended=worker in question.gone)
        self._local.fleet.hide_departed(whole)
        return await render(whole)

    async def _merge(self, whole: Instruments, worker: int, page: bytes, *, ended: bool) -> None:
        try:
            await merge(whole, page, ended=ended)
        except SnapshotError as error:
            log.error("a worker's counters are left out", extra={"worker": worker, "error": str(error)})

    async def ask(self, topic: str, question: bytes = b"") -> dict[int, bytes]:
        """Also raises GatewayError 503: the hub did not forward the question. The hub may answer for all (`Hub.topics`)."""
        asked = await self._questions.ask(lambda number: Ask(number, topic, question), self._limits.scrape_s)
        return asked.all()

    def publish(self, topic: str, message: bytes) -> None:
        self._channel.send(Publish(topic, message))

    @property
    def unsent(self) -> int:
        return self._channel.unsent

    async def ready(self) -> None:
        await self._current.wait()
        for source in tuple(self._found):  # the hub knows them when the first requests come
            self._send_found(source)

    async def stop(self) -> None:
        """The supervisor has had a snapshot made before it stops the workers."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_heartbeats())
            group.create_task(self._send_counters())
            group.create_task(self._execute_commands())
            group.create_task(self._answer_scrapes())
            group.create_task(self._take_arrived())
            group.create_task(self.knowledge.run())

    # -- background work

    async def _send_heartbeats(self) -> None:
        """Without them the supervisor gives this worker's connections to others (`handover.py`)."""
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
            took_s = self._local.clock() - begun  # with the requests that had their turns meanwhile
            await asyncio.sleep(max(busy_s, min(REPORT_MOST_S, took_s / REPORT_SHARE) - took_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._busy.wait()

    async def _answer_scrapes(self) -> None:
        """Send this worker's counters to the workers that make a page; one snapshot for all that wait for it."""
        while True:
            await self._scraped.wait()
            self._scraped.clear()
            scrapes, self._scrapes = self._scrapes, set()
            async with self._snapshots:
                page = await pack(self._local.page())
                for asker, number in scrapes:
                    self._channel.send(TopicAnswer(number, page, COUNTERS), asker)

    async def _execute_commands(self) -> None:
        """In the order that is the same for all workers."""
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

    async def _take_arrived(self) -> None:
        """Snapshots of other gateways, which the hub sends one by one. Commands do not wait for them."""
        while True:
            await self._restore(await self._arrived.get(), self.knowledge.restore)

    async def _restore(self, arrived: ReceivedSnapshot, take_in: Callable[[Snapshot], Awaitable[None]]) -> None:
        try:
            await take_in(arrived.snapshot)
        except KnowledgeError as error:
            log.warning("snapshot ignored", extra={"reason": str(error)})
        except Exception:  # a bug in it must not end the worker
            log.exception("a snapshot was not taken in")
        self._channel.send(TopicAnswer(arrived.number, topic=SNAPSHOT))

    async def _collect(self, question: Ask) -> None:
        """For the hub, which asks for one at a time."""
        try:
            snapshot = await self.knowledge.collect(*decode_wanted(question.question))
        except Exception as error:  # else the hub would wait in vain
            log.exception("a snapshot could not be collected")
            why = f"a worker could not collect it: {type(error).__name__}"
            self._channel.send(TopicAnswer(question.number, topic=SNAPSHOT, error=why))
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
                command = Reconfigure.to(part_of(command.config(type(self._local.live.config))))
            await self._local.execute(command)
        except ConfigError as error:
            return TopicAnswer(message.number, error=str(error))
        except Exception:  # a bug in one command must not end the execution of others
            log.exception("command failed")
            return TopicAnswer(message.number, internal=True)
        return TopicAnswer(message.number)

    async def _replay(self) -> None:
        """The commands from before this worker was started: all up to Current; then the first probes, side by side.

        Those that are not in force yet have an asker, who gets this worker's answer too.
        """
        before: list[Command] = []
        while True:
            asker, message = await self._commands.get()
            if isinstance(message, Current):
                break
            if isinstance(message, ReceivedSnapshot):
                await self._restore(message, self.knowledge.begin)
                continue
            if isinstance(message, FoundMembers):
                self._local.membership.seed(message.source, [_member(each) for each in message.members])
                continue
            before.append(message.command)
            answer = await self._executed(message)
            if answer.error is not None:  # the other workers refuse it, too
                log.warning("an earlier command is refused", extra={"error": answer.error})
            if asker != HUB:
                self._channel.send(answer, asker)
            await asyncio.sleep(0)  # there may be many of them: heartbeats go out in between
        await asyncio.gather(*map(self._local.probed, before))

    def __repr__(self) -> str:
        return f"<Peers, {self.replicator!r}>"


def _member(found: FoundMember) -> Member:
    return Member(*(getattr(found, name) for name in FoundMember.__struct_fields__))


def connect(local: LocalControl, channel: Channel, orphaned: Callable[[], None], limits: PeerLimits = PEER_LIMITS) -> Peers:
    """The control plane of a worker on the hub's channel. orphaned: called when the supervisor is gone."""
    transport = HubTransport(channel)
    peers = Peers(local, channel, transport, limits)

    def receive(worker: int, message: Message, _payload: bytes) -> None:
        transport.receive(worker, message)
        peers.receive(worker, message)

    channel.receive(receive, orphaned)
    return peers
